"""Checkpoints of real ranks to the released layout and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from safetensors.torch import load_file
from torch import Tensor

from k3train.__main__ import main
from k3train.checkpoint.hf.exporting import export_release
from k3train.checkpoint.hf.importing import import_release
from k3train.checkpoint.hf.names import Layout
from k3train.checkpoint.hf.release import Release
from k3train.checkpoint.hf.stored import StoredTensors
from k3train.checkpoint.load import load_checkpoint
from k3train.checkpoint.manifest import CheckpointError
from k3train.checkpoint.save import Save, save_checkpoint
from k3train.config.build import to_plain
from k3train.config.schema import Model, Optim, Precision, Run
from k3train.kernels.packing import make_packing
from k3train.model.payload import schedule_config
from k3train.optim.build import build_optimizer
from k3train.parallel.groups import stop_groups
from k3train.router.router import K3Router
from k3train.router.update import set_biases
from tests import model_step, sharded
from tests.parity.test_model import MODEL, randomise
from tests.ranks import run_ranks
from tests.released_reference import ReleasedModel

TOKENS = torch.randint(MODEL.vocab_size, (23,), generator=torch.Generator().manual_seed(5))


def model(precision: Precision) -> Model:
    return replace(MODEL, precision=precision)


def prepare(chunk: torch.nn.Module) -> None:
    """Values that a test can tell apart, and bounds that follow the bias as in training."""
    randomise(chunk)
    for module in chunk.modules():
        if isinstance(module, K3Router):
            set_biases([module], (module.bias - module.bias.mean())[None])


def save(
    rank: int, degrees: dict[str, int], precision: Precision, folder: Path, weights: dict[str, Tensor] | None
) -> Any:
    """Save a model; one rank also returns its logits on ``TOKENS`` and its weights."""
    chunks, groups = model_step.build(model(precision), degrees, prepare)
    if weights is not None:
        sharded.load(chunks, groups, weights)
    result = None
    if weights is None:
        valid = torch.ones(len(TOKENS), dtype=torch.bool)
        with torch.no_grad():
            logits = chunks[0](TOKENS[None], make_packing([0, len(TOKENS)], valid))[0]
        result = logits, sharded.whole(sharded.shards(chunks, groups))
    shared = schedule_config(chunks[0].config, groups.layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = [
        DistributedDataParallel(shared, ddp, chunk, disable_bucketing=i > 0, pg_collection=groups.pg)
        for i, chunk in enumerate(chunks)
    ]
    optimizer = build_optimizer(Optim(), wrapped, groups)
    optimizer.reload_model_params()
    settings = to_plain(Run(model=model(precision)))
    save_checkpoint(
        Save(
            directory=folder / "checkpoints",
            chunks=wrapped,
            optimizer=optimizer,
            train_state={"step": 3, "settings": settings},
            groups=groups,
            keep=2,
        )
    )
    stop_groups()
    return result


@dataclass
class Saved:
    run: Path
    logits: Tensor
    weights: dict[str, Tensor]


def saved(precision: Precision, folder: Path) -> Saved:
    logits, weights = run_ranks(1, save, {}, precision, folder, None)[0]
    return Saved(folder, logits, weights)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved(Precision.bf16, tmp_path_factory.mktemp("bf16"))


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved(Precision.fp32, tmp_path_factory.mktemp("fp32"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def start_from(rank: int, path: Path) -> Any:
    """Weights of a model on two tensor-parallel ranks that started from ``path``."""
    chunks, groups = model_step.build(model(Precision.bf16), {"tp": 2}, None)
    load_checkpoint(path, chunks=chunks, optimizer=None, groups=groups)
    held = [(key, shape, place, part.clone()) for key, shape, place, part in sharded.shards(chunks, groups)]
    stop_groups()
    return held


@pytest.mark.parametrize("layout", list(Layout))
def test_export_and_import_give_the_same_bits_back(bf16: Saved, tmp_path: Path, layout: Layout) -> None:
    export_release(bf16.run, tmp_path / "out", layout=layout, shard_bytes=30_000)
    config = import_release(tmp_path / "out", tmp_path / "back")
    assert config.model == model(Precision.bf16)
    assert config.layout is layout
    stored = StoredTensors(tmp_path / "back")
    assert stored.forms.keys() == bf16.weights.keys()
    different = [name for name, value in bf16.weights.items() if not torch.equal(stored.read(name), value)]
    assert different == []
    export_release(tmp_path / "back", tmp_path / "again", layout=layout, shard_bytes=30_000)
    first, second = contents(tmp_path / "out"), contents(tmp_path / "again")
    assert len([name for name in first if name.endswith(".safetensors")]) > 2
    assert first == second


def test_a_run_starts_from_an_imported_checkpoint_on_any_layout(bf16: Saved, tmp_path: Path) -> None:
    export_release(bf16.run, tmp_path / "out")
    import_release(tmp_path / "out", tmp_path / "back")
    ranks = run_ranks(2, start_from, tmp_path / "back")
    loaded = sharded.whole([shard for rank in ranks for shard in rank])
    assert loaded.keys() == bf16.weights.keys()
    assert [name for name, value in bf16.weights.items() if not torch.equal(loaded[name], value)] == []


def test_eight_ranks_export_the_files_of_one(bf16: Saved, tmp_path: Path) -> None:
    degrees = {"tp": 2, "pp": 2, "ep": 2}
    run_ranks(8, save, degrees, Precision.bf16, tmp_path / "run", bf16.weights)
    export_release(tmp_path / "run", tmp_path / "eight", shard_bytes=30_000)
    export_release(bf16.run, tmp_path / "one", shard_bytes=30_000)
    assert contents(tmp_path / "eight") == contents(tmp_path / "one")


def test_formulas_over_published_names_give_the_model_s_logits(fp32: Saved, tmp_path: Path) -> None:
    export_release(fp32.run, tmp_path / "out", precision=Precision.fp32)
    text = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    want = ReleasedModel(text, tensors(tmp_path / "out"), MODEL.mla.norm_eps)(TOKENS)
    torch.testing.assert_close(fp32.logits.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_dtypes_of_an_export(fp32: Saved, tmp_path: Path) -> None:
    export_release(fp32.run, tmp_path / "kept")
    export_release(fp32.run, tmp_path / "like", like_release=True)
    kept, like = (Release(tmp_path / name).headers for name in ("kept", "like"))
    always = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    assert {n for n, (dtype, _) in like.items() if dtype == "F32"} == {n for n in like if n.endswith(always)}
    more = {name for name, (dtype, _) in kept.items() if dtype == "F32" and not name.endswith(always)}
    assert more == {
        name
        for name in kept
        if name.endswith(("norm.weight", ".gate.weight", "_res_proj.weight")) and not name.endswith(always)
    }
    assert {dtype for dtype, _ in kept.values()} == {"BF16", "F32"}
    rounded = tensors(tmp_path / "kept")["language_model.lm_head.weight"]
    assert torch.equal(rounded, fp32.weights["output_head.weight"].bfloat16())


def test_mtp_under_the_names_of_deepseek(bf16: Saved, tmp_path: Path) -> None:
    """Its projection reads the embedding first there, and the hidden state first here."""
    export_release(bf16.run, tmp_path / "out")
    joined = tensors(tmp_path / "out")[f"language_model.model.layers.{MODEL.num_layers}.eh_proj.weight"]
    hidden, embedding = bf16.weights["mtp.projection.weight"].chunk(2, 1)
    assert torch.equal(joined, torch.cat([embedding, hidden], 1))


def test_a_matrix_that_would_be_rounded_is_refused(fp32: Saved, tmp_path: Path) -> None:
    export_release(fp32.run, tmp_path / "out", precision=Precision.fp32)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight is F32, which a bf16 model would round"
    ) as e:
        import_release(tmp_path / "out", tmp_path / "back", precision=Precision.bf16)
    assert len(str(e.value).splitlines()) == 22
    assert "more" in str(e.value).splitlines()[-1]
    import_release(tmp_path / "out", tmp_path / "back")
    stored = StoredTensors(tmp_path / "back")
    assert all(torch.equal(stored.read(name), value) for name, value in fp32.weights.items())


def test_the_command_says_what_it_did(
    bf16: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["convert", "export", str(bf16.run), str(out), "--shard-gb", "0.00003"]) == 0
    said = capsys.readouterr().out
    assert f"{out}: 250 tensors" in said
    assert "  model.kda.decay_rank = 4" in said
    assert main(["convert", "import", str(out), str(back)]) == 0
    assert f"checkpoint.load_from={back}" in capsys.readouterr().out
    assert main(["convert", "export", str(bf16.run), str(out)]) == 2
    assert capsys.readouterr().err == f"{out} exists: give a new folder\n"
    (tmp_path / "file").touch()
    for verb, source in (("export", bf16.run), ("import", out)):
        assert main(["convert", verb, str(source), str(tmp_path / "file" / "x")]) == 3
        assert capsys.readouterr().err == (
            f"{tmp_path}/file/x cannot be made: {tmp_path}/file is not a folder; "
            "give OUT a place with rights and room\n"
        )
    assert main(["convert", "import", str(tmp_path / "no"), str(tmp_path / "x")]) == 2
    assert "config.json is missing" in capsys.readouterr().err
    assert main(["convert", "export", str(tmp_path), str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path} is no checkpoint, and {tmp_path}/checkpoints holds none: give a ")
    assert main(["convert", "export", str(tmp_path / "no"), str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/no does not exist: give a trained run's folder")
    assert not (tmp_path / "x").exists()
