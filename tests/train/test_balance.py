"""What a run records about the balance of its experts, over pipeline ranks, and how it is read afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train.__main__ import main
from k3train.config.problems import BadInput
from k3train.config.schema import (
    BalanceAlarms,
    BalanceMonitor,
    Checkpoint,
    Curriculum,
    Guards,
    Model,
    Moe,
    Monitor,
    Parallel,
    Quantile,
    Router,
    Run,
    Stage,
)
from k3train.monitor.metrics_file import METRICS
from tests.docs.test_studies import load
from tests.train.runs import make_run, records, train_run

NAMES = {
    *("tokens", "max_violation", "load_cv", "dead_experts", "causal_lag", "bias_range", "bias_drift"),
    "saturated_experts",
}
AUDIT = {"exact_error", "own_violation"}


def five_steps(folder: Path, balance: BalanceMonitor, ranks: int = 1, **changes: object) -> Run:
    stage = Stage(context_tokens=128, tokens=5 * 512, batch_tokens=512)
    run = make_run(
        folder,
        ranks=ranks,
        curriculum=Curriculum(stages={"only": stage}, order=["only"], eval_tokens=128),
        parallel=Parallel(pp=ranks),
        monitor=Monitor(balance=balance),
        checkpoint=Checkpoint(),
        **changes,
    )
    assert train_run(run) == [0] * ranks
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """The same five steps on one rank and on two pipeline ranks."""
    balance = BalanceMonitor(
        audit_every_steps=2,
        save_every_steps=2,
        alarms=BalanceAlarms(patience_steps=3, max_violation=0.0, dead_experts=None, causal_lag=None),
    )
    return [five_steps(tmp_path_factory.mktemp(f"ranks{ranks}"), balance, ranks) for ranks in (1, 2)]


def test_every_layer_of_every_pipeline_rank_is_recorded(runs) -> None:
    one, two = (records(run, "balance") for run in runs)
    assert [each["step"] for each in one] == [1, 2, 3, 4, 5]
    for a, b in zip(one, two, strict=True):
        assert a["layers"] == b["layers"] == [2, 3, 4, 5]
        assert set(a["values"]) == set(b["values"]) == NAMES | (AUDIT if a["step"] % 2 == 0 else set())
        # Pipeline ranks draw other initial weights, so only the tokens are the same.
        assert a["values"]["tokens"] == b["values"]["tokens"] == pytest.approx([a["values"]["tokens"][0]] * 4)
        assert all(0 < each < 3 for each in a["values"]["max_violation"] + b["values"]["max_violation"])
        assert max(a["values"]["max_violation"]) == pytest.approx(
            records(runs[0], "step")[a["step"] - 1]["router_max_violation"], rel=1e-4
        )
    assert all(0 < error < 0.2 for error in one[1]["values"]["exact_error"])


def test_an_audited_step_is_recorded_whatever_else_is(tmp_path: Path) -> None:
    run = five_steps(tmp_path, BalanceMonitor(layers_every_steps=5, audit_every_steps=2))
    found = {each["step"]: "exact_error" in each["values"] for each in records(run, "balance")}
    assert found == {2: True, 4: True, 5: False}


def test_an_audited_step_that_is_computed_again_is_audited_again(runs, tmp_path: Path) -> None:
    run = five_steps(tmp_path, BalanceMonitor(audit_every_steps=2), guards=Guards(replay_every_steps=2))
    once = [each["values"] for each in records(runs[0], "balance")]
    assert [each["values"] for each in records(run, "balance")] == once


def test_an_alarm_is_an_event_and_on_the_console(runs) -> None:
    for run in runs:
        (alarm,) = (each for each in records(run, "event") if each["event"] == "router_alarm")
        assert alarm["step"] == 3
        assert alarm["detail"]["quantity"] == "max_violation"
        assert alarm["detail"]["steps"] == 3


def test_the_study_collects_finished_runs_only(runs, tmp_path: Path) -> None:
    collect = load("collect_balance")
    found = collect.read_run(Path(runs[1].dir))
    assert found["tokens"] == 5 * 512
    assert len(found["max_violation"]) == 5
    assert found["heldout_loss"] == records(runs[1], "eval")[-1]["loss"]
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    lines = (Path(runs[1].dir) / METRICS).read_text().splitlines()
    (unfinished / METRICS).write_text("\n".join(line for line in lines if '"finished"' not in line) + "\n")
    with pytest.raises(BadInput, match="has not finished"):
        collect.read_run(unfinished)
    assert collect.name_of(runs[0]) == "quantile"
    window = Router(quantile=Quantile(window=4, strength=0.5))
    other = Run(model=Model(moe=Moe(router=window)))
    assert collect.name_of(other) == "quantile window 4 strength 0.5"


def test_the_verb_reads_records_and_histograms(runs, capsys: pytest.CaptureFixture[str]) -> None:
    for run, files in zip(runs, (2, 4), strict=True):
        assert len(list((Path(run.dir) / "balance").glob("*.npz"))) == files
        assert main(["balance", run.dir, "--last", "3", "--bins", "50"]) == 0
        out = capsys.readouterr().out
        assert "mean of 3 recorded steps, 3 to 5" in out
        assert out.count("differs by") == 2 * 4
    with pytest.raises(SystemExit, match="2"):
        main(["balance", run.dir, "--bins", "0"])
    assert "argument --bins: 0 is no number of bins; use 2 or more" in capsys.readouterr().err
    assert main(["balance", run.dir, "--bins", "7"]) == 2
    assert "--bins 7 does not divide" in capsys.readouterr().err
    assert main(["balance", str(Path(run.dir) / "nowhere")]) == 2
    assert "nowhere/metrics.jsonl does not exist: give the directory of a run" in capsys.readouterr().err


def test_a_run_without_any_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["balance", str(tmp_path)]) == 2
    assert f"{tmp_path}/metrics.jsonl is empty: give the directory of a run" in capsys.readouterr().err
