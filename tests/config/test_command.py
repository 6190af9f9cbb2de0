"""The command's verbs as a user runs them: what they print and which code they end with."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.__main__ import VERBS, main
from k3train.checkpoint.listing import last_trained
from k3train.config.build import to_plain
from k3train.config.compose import compose, save_resolved
from k3train.curriculum.stages import stage_table
from k3train.data.corpus import Corpus
from k3train.data.same_text import check_text_on_disk
from tests.saved import save_checkpoint
from tests.train.runs import make_corpus


def test_check_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "experiment=k3", "model.mtp.num_layers=0"]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert line.startswith("OK  k3: 2.78 T parameters, 104 B active, 4 stages")
    assert "4096 ranks" in line


def test_check_says_everything_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model.hiden_size=3", "checkpoint.keep=0", "++x=1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("3 problems in the configuration:\n")
    for words in ("Did you mean model.hidden_size?", "checkpoint.keep = 0", "'++x=1'"):
        assert words in err


def test_documented_problems_are_the_real_ones(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    command, _, expected = page.partition("```text\n$ k3train ")[2].partition("```")[0].partition("\n")
    assert main(command.split()) == 2
    assert capsys.readouterr().err == expected


def test_data_verbs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["data", "verify", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["data", "build", "tinny"])
    assert stop.value.code == 2


def test_a_corpus_is_described_and_its_folder_pointed_into(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "corpora" / "counting"
    make_corpus(folder, documents=20, seed=1)
    assert main(["data", "verify", str(folder)]) == 0
    verified = capsys.readouterr().out
    assert re.fullmatch(rf"OK  {folder}: [\d,]+ documents, [\d,]+ tokens, every file as written\n", verified)
    assert main(["data", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("counting\n  documents ")
    assert re.search(r"\n  tokens\.bin +[\d,]+ bytes\n", shown)
    for action in ("verify", "show"):
        assert main(["data", action, str(folder.parent)]) == 2
        assert f"is not a corpus but holds some; give {folder}." in capsys.readouterr().err
        (folder / "tokens.idx").write_bytes((folder / "tokens.idx").read_bytes()[:-1])
        assert main(["data", action, str(folder)]) == 2
        assert "tokens.idx has" in capsys.readouterr().err


def test_options_and_overrides_in_any_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "seed=3", "--config-dir", str(tmp_path), "name=x"]) == 2
    assert "has no run.yaml" in capsys.readouterr().err


def test_show_of_a_file_takes_no_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_resolved(compose([]), tmp_path / "run.yaml")
    for more in (["seed=5"], ["optim", "seed=5"]):
        with pytest.raises(SystemExit, match="2"):
            main(["show", "--run", str(tmp_path / "run.yaml"), *more])
        said = "argument --run: a file is shown as it is, without seed=5; leave one of them out"
        assert said in capsys.readouterr().err


def test_show_marks_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "model.num_heads=8", "name=wide"]) == 0
    out = capsys.readouterr().out
    default = compose([]).model
    assert f"* num_heads: 8  (default {default.num_heads})" in out
    assert f" hidden_size: {default.hidden_size}" in out
    assert "* hidden_size" not in out
    assert "cp2 dp1" in out
    assert "32,768" in out
    assert "routed_experts" in out


def test_show_without_changes_marks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show"]) == 0
    assert "*" not in capsys.readouterr().out


def test_tables_in_a_pipe_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["show", "experiment=k3"]) == 0
    out = capsys.readouterr().out
    assert "pp8x3 tp2 cp16 ep32 dp16" in out
    assert "…" not in out


@pytest.mark.parametrize("given", [["optm"], ["experiment=k3", "memory"], ["--diff", "plan"]])
def test_show_has_one_word(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *given]) == 2
    words = f"show {given[-1]}: no such part; there is show optim, and show alone prints the settings\n"
    assert capsys.readouterr().err == words
    assert main(["show", "seed=3", "optim"]) == 0
    assert "optimizer state: " in capsys.readouterr().out


def test_messages_show_the_words_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model=5", "model.kda=3"]) == 2
    err = capsys.readouterr().err
    assert "model.KEY=VALUE, or select" in err
    assert "model.kda.KEY=VALUE." in err


def test_show_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", "--diff", "seed=3"]) == 0
    assert capsys.readouterr().out == "seed: 1234 -> 3\n"
    save_resolved(compose(["seed=3"]), tmp_path / "run.yaml")
    for run in (tmp_path / "run.yaml", tmp_path):
        assert main(["show", "--diff", "--against", str(run), "seed=3"]) == 0
        assert "no difference" in capsys.readouterr().out


def test_a_stage_or_source_that_is_not_there_is_one_difference(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from k3train.config.compose import compose, save_resolved

    run = compose([])
    run.curriculum.order.remove("s32768")
    del run.curriculum.stages["s32768"]
    run.data.sources["more"] = run.data.sources.pop("code")
    for stage in run.curriculum.stages.values():
        stage.mix = {"prose": 1.0}
    save_resolved(run, tmp_path / "run.yaml")
    assert main(["show", "--run", str(tmp_path / "run.yaml"), "--diff"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("curriculum.stages.s32768") == printed.count("data.sources.code") == 1
    assert "curriculum.stages.s32768: is not there\n" in printed
    assert "data.sources.more.path: null -> " in printed


def test_show_resolved_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_resolved(compose(["name=saved"]), tmp_path / "run.yaml")
    for run in (tmp_path / "run.yaml", tmp_path):
        assert main(["show", "--run", str(run), "--diff"]) == 0
        assert "saved" in capsys.readouterr().out
    assert main(["show", "--run", str(tmp_path / "nothing.yaml")]) == 2


def test_train_on_several_machines_points_to_the_launcher(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "experiment=k3", f"dir={tmp_path}/run"]) == 2
    assert "launch/slurm.py" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [[], ["chekc"], ["check", "--nothing"], ["data", "destroy", "x"], ["sample"]]
)
def test_wrong_usage_is_bad_input(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: k3train" in capsys.readouterr().err


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Overrides that give the default run a small corpus of its own: the checkout may have none yet."""
    folder, heldout = tmp_path / "corpus", tmp_path / "heldout"
    make_corpus(folder, documents=400, seed=1)
    make_corpus(heldout, documents=40, seed=2)
    overrides = ["data.tokenizer=null", f"data.heldout.heldout={heldout}"]
    for name in compose([]).data.sources:
        overrides += [f"data.sources.{name}.path={folder}", f"data.sources.{name}.max_epochs=1000"]
    return overrides


def test_train_does_not_turn_one_run_into_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: list[str]
) -> None:
    """Refused before any rank starts, with progress taken from the checkpoints that are there."""
    old = compose([f"dir={tmp_path}", *corpus])
    save_resolved(old, tmp_path / "run.yaml")
    second = stage_table(old)[1].start_step + 1
    save_checkpoint(tmp_path, second)
    before = (tmp_path / "run.yaml").read_bytes()
    changes = ["seed=9", "curriculum.stages.s2048.batch_tokens=16384", "optim.beta2=0.99"]
    assert main(["train", f"dir={tmp_path}", *corpus, *changes]) == 2
    err = capsys.readouterr().err
    assert "seed = 9 was 1234" in err
    assert "curriculum.stages.s2048.batch_tokens = 16384 was 8192" in err
    assert "beta2" not in err
    assert (tmp_path / "run.yaml").read_bytes() == before


def test_changed_text_is_refused_before_ranks_start_and_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: list[str]
) -> None:
    run = compose([f"dir={tmp_path / 'run'}", *corpus])
    folder, (first, *rest) = Path(run.dir), list(run.data.sources)
    save_resolved(run, folder / "run.yaml")
    open_text = Corpus(tmp_path / "corpus", vocab_size=run.model.vocab_size)
    known = dict.fromkeys((first, *rest), open_text.fingerprint)
    open_text.close()
    tokens = stage_table(run)[0].stage.batch_tokens
    record = {"settings": to_plain(run), "tokens": tokens, "data": {"corpora": known}}
    save_checkpoint(folder, 1, record)
    check_text_on_disk(run, last_trained(folder))

    shutil.rmtree(tmp_path / "corpus")
    make_corpus(tmp_path / "corpus", documents=400, seed=3)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(["train", f"dir={folder}", *corpus, "optim.beta2=0.99"]) == 2
    said = capsys.readouterr()
    refused = f"data.sources.{first}: {tmp_path / 'corpus'} is not the text that this run was trained on"
    assert refused in said.err
    assert "changed since" not in said.out
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {name: text for name, text in after.items() if name != "lock"} == before

    run.resume.override = ["data.sources"]
    check_text_on_disk(run, last_trained(folder))  # accepted
    run.resume.override = []
    through = replace(last_trained(folder), tokens=stage_table(run)[-1].end_tokens)
    check_text_on_disk(run, through)  # nothing is drawn any more


def test_run_directory_that_cannot_be_one_is_the_environments_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", f"dir={tmp_path}/file/run", *corpus]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_sample_of_no_run_is_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["sample", str(tmp_path / "nothing"), "--prompt", "a"]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "code", "said"),
    [
        ("train", 75, "interrupted before training; the same command goes on\n"),
        ("show", 1, "interrupted; the same command starts over\n"),
        ("check", 1, "interrupted; the same command starts over\n"),
    ],
)
def test_an_interrupted_verb_promises_only_what_holds(
    verb: str,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("k3train.config.compose.compose", interrupt)
    assert main([verb]) == code
    assert capsys.readouterr().err == said


INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, os.path.join(os.getcwd(), "data"))
import text_offline

def interrupted():
    (folder,) = os.listdir(sys.argv[-1])  # what is written lies beside its place
    signal.raise_signal(signal.SIGINT)

from k3train.__main__ import main
import bpe
bpe.train = lambda *_, **__: interrupted()
sys.exit(main(sys.argv[1:]))
"""


def test_an_interrupted_build_says_so_without_a_traceback(tmp_path: Path) -> None:
    """The real signal, at a moment that no clock decides; other moments: tests/unit/data."""
    arguments = ["data", "build", "tiny", "--offline", "--out", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr == b"interrupted: no corpus was built or replaced; the same command starts over\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"usage: k3train {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--tokens", "-1"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "1e-40"],
        ["--temperature", "1e30"],
        ["--seed", "-1"],
        ["--seed", "9" * 30],
    ],
)
def test_sample_refuses_numbers_that_mean_nothing(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sample", "any", "--prompt", "a", *options])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_sample_refuses_a_prompt_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sample", "any", "--prompt", "\udcff"])
    assert "is not UTF-8" in capsys.readouterr().err


def test_sample_names_a_tokenizer_that_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = compose([])
    run.data.tokenizer = str(tmp_path / "gone.json")
    save_resolved(run, tmp_path / "run.yaml")
    assert main(["sample", str(tmp_path), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "gone.json' cannot be read" in error


def test_sample_writes_no_more_than_the_longest_context(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_resolved(compose([]), tmp_path / "run.yaml")
    assert main(["sample", str(tmp_path), "--prompt", "a", "--tokens", "99999999999999"]) == 2
    rule = "is above 32768, the longest context that the run trains on; use 32768 or less"
    assert capsys.readouterr().err == f"--tokens 99999999999999 {rule}\n"


def _command(arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    shell = f"set -o pipefail; {shlex.quote(sys.executable)} -m k3train {arguments}"
    return subprocess.run(
        ["bash", "-c", shell], env={**os.environ, **environment}, capture_output=True, check=False
    )


def test_output_that_cannot_show_unicode_or_is_closed_or_full() -> None:
    shown = _command("show", PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert _command("show | head -1").stderr == b""
    full = _command("check > /dev/full")
    assert full.returncode == 3
    assert full.stderr == b"the output cannot be written: No space left on device\n"


def test_name_that_leads_elsewhere_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "name=a/../../b"]) == 2
    assert main(["check", "name=/etc/b"]) == 2
    assert capsys.readouterr().err.count("[run.name]") == 2
