"""The estimate of a rank's memory: against one measured on a GPU, and as the user meets it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

from k3train.__main__ import main
from k3train.config.compose import compose
from k3train.config.problems import ConfigError
from k3train.config.schema import Model, Parallel, Precision, Recompute
from k3train.curriculum.stages import stage_table
from k3train.kernels.kda.triton_kda import HEAD_DIM
from k3train.optim.memory import (
    GIB,
    Memory,
    check_host_memory,
    host_shortage,
    most_waiting,
    saving_bytes,
    stage_memory,
)
from k3train.parallel.layout import make_layout
from k3train.plan.activations import Activations
from k3train.plan.recompute import RecomputePlan

MEASURED = (Path(__file__).parents[3] / "docs" / "benchmarks" / "h200-2026-11-30-step.md").read_text()


def memory(*overrides: str) -> Memory:
    run = compose([*overrides])
    return stage_memory(run, stage_table(run)[0])


def measured(pattern: str) -> float:
    found = re.search(pattern, MEASURED)
    assert found is not None, pattern
    return float(found[1])


def test_a_model_of_4_billion_parameters_as_measured_on_an_h200() -> None:
    one = memory("experiment=proxy_gpu", "parallel.cuda_graphs=false")
    two = memory(
        "experiment=proxy_gpu",
        "parallel.cuda_graphs=false",
        "curriculum.stages.s8192.micro_batch_sequences=2",
        "curriculum.stages.s8192.batch_tokens=16384",
    )
    assert one.before / GIB == pytest.approx(measured(r"peak GiB, ([\d.]+) of them"), abs=0.05)
    of_one = measured(r"peak GiB, [^|]*\| [^|]*\| ([\d.]+) \|")
    of_two = measured(r"peak GiB \| [^|]*\| ([\d.]+) \|")
    assert one.total / GIB == pytest.approx(of_one, rel=0.02)
    assert two.total / GIB == pytest.approx(of_two, rel=0.02)
    replayed = memory("experiment=proxy_gpu").total / GIB
    assert replayed == pytest.approx(
        measured(r"8,192 tokens, forward \+ backward \| 125.*\| ([\d.]+) \|"), rel=0.01
    )
    assert memory("experiment=proxy_gpu", "device=cpu").total == one.total, "a CPU has no graphs"
    # measured before KDA kept its scores, 276 bytes a token and head
    scores = 8192 * 16 * 8 * 276
    assert (two.total - one.total - scores) / GIB == pytest.approx(of_two - of_one, rel=0.03)


def test_scores_are_kept_where_nothing_is_recomputed_and_kernels_for_hopper_fit() -> None:
    model = compose(["experiment=proxy_gpu"]).model
    # of a chunk and head: two squares in bf16, a decay for each channel; two norms and beta for each token
    chunk = 2 * 64 * 64 * 2 + HEAD_DIM * 4 + 3 * 64 * 4
    fp32 = replace(model, precision=Precision.fp32)
    narrow = replace(model, kda=replace(model.kda, head_dim=64))
    for changed, each in ((model, chunk), (fp32, 0), (narrow, 0)):
        layout = make_layout(changed, Parallel(), 1)
        policies = (RecomputePlan(), RecomputePlan(kda=Recompute.selective))
        kept, less = (Activations(changed, layout, policy, 8192).layer(0) for policy in policies)
        width = 4 if changed is fp32 else 2
        # q, k, v, the decay and the normed output; the layer's input, mixed and normed
        made_again = 8192 * (5 * 16 * changed.kda.head_dim + 2 * model.hidden_size) * width
        assert kept - less == made_again + 8192 // 64 * 16 * each


LONG = re.findall(
    r"^\| ([\d,]+) \| \d+ \| `(parallel\..*?)` \|.*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\|$",
    (Path(__file__).parents[3] / "docs" / "benchmarks" / "h200-2026-11-30-long.md").read_text(),
    re.M,
)


def test_recomputation_and_long_sequences_as_measured_on_an_h200() -> None:
    assert len(LONG) >= 11
    for tokens, settings, peak, written, _ in LONG:
        length = tokens.replace(",", "")
        stage = [f"curriculum.stages.s8192.{key}_tokens={length}" for key in ("context", "batch")]
        stage.append(f"curriculum.stages.s8192.tokens={int(length) * 2}")
        estimate = memory("experiment=proxy_gpu", *settings.split(), *stage).total / GIB
        assert estimate == pytest.approx(float(written), abs=0.051), (tokens, settings)
        assert estimate == pytest.approx(float(peak), rel=0.03, abs=3.5), (tokens, settings)


def test_what_reduces_memory_reduces_the_estimate() -> None:
    base = ["experiment=k3", "parallel.recompute=none"]
    kept = memory(*base).parts
    for policy in ("selective", "full"):
        less = memory("experiment=k3", f"parallel.recompute={policy}").parts
        assert less["activations"] < kept["activations"]
        assert less["work space"] >= kept["work space"]
        kept = {**less, "work space": kept["work space"]}
    many, few = memory("experiment=k3"), memory("experiment=k3", "cluster.nodes=256")
    assert many.parts["optimizer state"] < few.parts["optimizer state"]
    assert many.parts["parameters"] == few.parts["parameters"]


@pytest.mark.parametrize(
    ("parallel", "passes", "most"),
    [
        (Parallel(), 8, [1]),
        (Parallel(pp=4), 8, [4, 3, 2, 1]),
        (Parallel(pp=4), 2, [2, 2, 2, 1]),
        # The warm-up of megatron-core's interleaved schedule, and the pass that follows it.
        (Parallel(pp=2, vp=2), 4, [5, 3]),
        (Parallel(pp=2, vp=2), 2, [4, 3]),
    ],
)
def test_passes_in_flight(parallel: Parallel, passes: int, most: list[int]) -> None:
    layout = make_layout(Model(num_layers=4), parallel, parallel.pp)
    kept = [1] * layout.vp
    assert [most_waiting(kept, layout, rank, passes) for rank in range(layout.pp)] == most


@pytest.mark.parametrize(("pp", "vp", "passes"), [(2, 2, 2), (2, 3, 8), (4, 2, 4), (4, 3, 16), (8, 2, 32)])
def test_what_waits_is_what_megatron_core_s_order_of_chunks_leaves(pp: int, vp: int, passes: int) -> None:
    """Chunks that keep unlike amounts: more passes of the first wait than of the last."""
    layout = make_layout(Model(num_layers=pp * vp), Parallel(pp=pp, vp=vp), pp)
    kept = [7**chunk for chunk in range(vp)]
    for sizes in (kept, kept[::-1]):
        for rank in range(pp):
            table = get_schedule_table(passes, vp, pp)
            warm_up = min(passes * vp, 2 * (pp - rank - 1) + (vp - 1) * pp)
            held = most = 0
            for chunk in convert_schedule_table_to_order(warm_up, vp, table):  # from 1, negative backward
                held += sizes[chunk - 1] if chunk > 0 else -sizes[-chunk - 1]
                most = max(most, held)
            assert held == 0
            assert most_waiting(sizes, layout, rank, passes) == most


def test_too_small_a_device_is_refused_before_ranks_start(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["experiment=proxy_gpu", "cluster.device_memory_gib=80"]
    for verb in ("check", "train"):
        assert main([verb, *settings]) == 2
        said = capsys.readouterr().err
        assert re.search(
            r"stage s8192 needs about 93\.4 GiB on a rank, more than the 80\.0 GiB of its device; the "
            r"largest part, optimizer state, takes 49\.5\. Start more ranks, .* or set optim\.offload=cpu; "
            r".*\[stage\.memory\]",
            said,
        ), said
    assert main(["check", "cluster.device_memory_gib=0.0015"]) == 2
    assert re.search(
        r"needs about 0\.\d\d GiB on a rank, more than the 0\.0015 GiB of", capsys.readouterr().err
    )
    for enough in ("140", "0"):
        assert main(["check", settings[0], f"cluster.device_memory_gib={enough}"]) == 0
    assert main(["check", *settings, "optim.offload=cpu"]) == 0
    capsys.readouterr()
    assert main(["show", settings[0]]) == 0
    assert re.search(
        r"^s8192 +8\.3 +16\.5 +49\.5 +16\.\d +3\.\d +93\.4 +57\.8 *$", capsys.readouterr().out, re.M
    )


def test_what_is_kept_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    long = [f"curriculum.stages.s8192.{key}_tokens=524288" for key in ("context", "batch")]
    full = [
        "experiment=proxy_gpu",
        "parallel.recompute=full",
        *long,
        "curriculum.stages.s8192.tokens=1048576",
    ]
    assert memory(*full).host == 0
    inputs = memory(*full, "parallel.recompute_offload=true").host
    assert inputs == 12 * 524288 * 2048 * 2  # one hidden state a layer, in bf16
    measured_gib = next(float(row[4]) for row in LONG if row[0] == "524,288")
    assert inputs / GIB == pytest.approx(measured_gib, rel=0.1)  # libraries and the program are in that
    both = memory(*full, "parallel.recompute_offload=true", "optim.offload=cpu").host
    # master weights and moments; two rooms for the embedding's 335,544,320 gradients, rounded up, and two for
    # a layer's 100,663,296 of experts, whose optimizer is another
    assert (both - inputs) / GIB == pytest.approx(49.5 + 4 + 1, abs=0.1)
    run = compose([*full, "parallel.recompute_offload=true"])
    check_host_memory(run, 24.1)
    with pytest.raises(ConfigError) as refused:
        check_host_memory(run, 23.9)
    assert "stage s8192 keeps about 24.0 GiB on the host for each of the 1 ranks" in str(refused.value)
    assert main(["show", *full, "parallel.recompute_offload=true"]) == 0
    assert re.search(r"^s8192 .* 120\.9 +24\.0 +57\.8 *$", capsys.readouterr().out, re.M)


def test_what_a_save_takes_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, master weights and moments, whole tensors shared out among data-parallel ranks."""
    run, few = compose(["experiment=k3"]), compose(["experiment=k3", "cluster.nodes=256"])
    for plan, of_few in zip(stage_table(run), stage_table(few), strict=True):
        assert saving_bytes(run, plan) < saving_bytes(few, of_few) < 2 * saving_bytes(run, plan)
    one = compose(["experiment=proxy_gpu"])
    alone = stage_memory(one, stage_table(one)[0])
    held = alone.parts["parameters"] + alone.parts["optimizer state"]
    assert alone.saving == pytest.approx(held, rel=1e-3)  # fp32 parameters are written as master weights too
    each = max(saving_bytes(run, plan) for plan in stage_table(run)) / GIB
    assert host_shortage(run, 8 * each + 1) is None
    said = host_shortage(run, 8 * each - 1)
    assert said is not None
    assert f"takes about {each:,.1f} GiB of the host's memory for each of the 8 ranks" in said
    kept = compose(["experiment=proxy_gpu", "optim.offload=cpu"])
    own = stage_memory(kept, stage_table(kept)[0])
    assert host_shortage(kept, (own.host + own.saving) / GIB + 0.1) is None
    assert host_shortage(kept, (own.host + own.saving) / GIB - 0.1) is not None
    assert main(["show", "experiment=k3"]) == 0
    assert re.search(rf"^s8k .* {each:,.1f} *$", capsys.readouterr().out, re.M)


def test_a_small_model_is_more_than_nothing_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "optim.offload=cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^stage .* optimizer state .* all +on the host +host, a save *$", out, re.M)
    row = re.search(r"^s256 +0\.\d{3} +0\.\d{3} +0\.0 .* (0\.\d{3}) +0\.\d{3} *$", out, re.M)
    assert row is not None, out
    assert float(row[1]) == pytest.approx(memory("optim.offload=cpu").host / GIB, abs=6e-4)
    assert float(row[1]) > 0


def test_an_evaluation_one_stage_ahead_is_priced_where_it_needs_more_than_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On one rank of its own context parallelism a stage evaluates at eight times its context."""
    run = compose(["experiment=k3"])
    first, *_, last = stage_table(run)
    step, most = stage_memory(run, first, ahead=False), stage_memory(run, first)
    assert (step.ahead, most.ahead) == (None, 65_536)
    assert most.total > step.total
    assert most.before == step.before
    assert stage_memory(run, last) == stage_memory(run, last, ahead=False)
    limit = f"cluster.device_memory_gib={(step.total + most.total) / 2 / GIB}"
    assert main(["check", "experiment=k3", limit]) == 2
    said = capsys.readouterr().err
    assert "stage s8k needs about" in said
    assert "to evaluate at the next stage's 65,536 tokens, more than" in said
    assert "Set curriculum.eval_one_ahead=false, or raise parallel.cp" in said
    main(["check", "experiment=k3", limit, "curriculum.eval_one_ahead=false"])
    assert "stage s8k" not in capsys.readouterr().err


def test_the_sentence_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("cluster.device_memory_gib=100", "curriculum.eval_one_ahead=false")
    wide = "curriculum.stages.s1m.parallel.cp=16"
    assert main(["check", "experiment=k3", *small, wide]) == 2
    said = capsys.readouterr().err
    assert "4 problems" in said
    assert re.search(
        r"stage s8k .* gradients, takes .*Raise parallel\.pp, parallel\.tp or parallel\.ep", said
    )
    assert re.search(
        r"stage s1m .* activations, takes .*\. Set parallel\.recompute_offload=true, raise parallel\.cp", said
    )
    assert main(["check", "experiment=k3", *small, wide, "parallel.recompute_offload=true"]) == 2
    assert "3 problems" in capsys.readouterr().err
    assert main(["check", "experiment=k3", *small, wide, "parallel.recompute=selective"]) == 2
    assert "Set parallel.recompute=full, raise parallel.cp" in capsys.readouterr().err
