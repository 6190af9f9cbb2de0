"""Releases made by hand: what an import takes, what it refuses in which words, and the memory it needs."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3train.checkpoint.hf import importing, stored
from k3train.checkpoint.hf.config import to_config
from k3train.checkpoint.hf.exporting import export_release
from k3train.checkpoint.hf.importing import import_release
from k3train.checkpoint.hf.names import Form, Layout, packed_names, table
from k3train.checkpoint.hf.release import INDEX, Release
from k3train.checkpoint.hf.shards import Planned, plan_shards, write_shards
from k3train.checkpoint.hf.stored import NewTensor, StoredTensors, write_checkpoint
from k3train.checkpoint.hf.vision import read_vision, vision_tensors
from k3train.checkpoint.manifest import CheckpointError
from k3train.config.build import to_plain
from k3train.config.schema import Kda, Mla, Model, Moe, Precision
from tests.ranks import run_ranks
from tests.unit.checkpoint.hf.test_mxfp4 import pack

MODEL = Model(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    vocab_size=8,
    dense_ffn_size=12,
    precision=Precision.bf16,
    kda=Kda(head_dim=4, decay_rank=4),
    mla=Mla(q_lora_rank=8, kv_lora_rank=6, qk_head_dim=4, qk_shared_head_dim=2, v_head_dim=4),
    moe=Moe(num_experts=3, top_k=2, expert_ffn_size=32, latent_size=64, shared_ffn_size=32),
)
"""KDA with a dense feed-forward, MLA with experts whose inputs fill whole MXFP4 groups."""
MOE = "language_model.model.layers.1.block_sparse_moe"
VISION = {
    "vt_num_hidden_layers": 1,
    "vt_hidden_size": 4,
    "vt_intermediate_size": 6,
    "qkv_hidden_size": 8,
    "patch_size": 2,
    "init_pos_emb_height": 3,
    "init_pos_emb_width": 3,
    "merge_kernel_size": [2, 2],
    "text_hidden_size": 16,
}
Tensors = dict[str, Tensor]


def random(shape: tuple[int, ...], seed: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(seed.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def make_release(
    folder: Path,
    *,
    packed: bool = False,
    images: bool = False,
    edit: Callable[[Tensors, dict[str, Any]], None] | None = None,
) -> Tensors:
    """Write a release of ``MODEL`` with the library's own writer, after ``edit``; returns its tensors."""
    tensors: Tensors = {}
    config = to_config(MODEL, Layout.k3, precision=Precision.bf16, vision=VISION if images else None)
    for entry in table(MODEL):
        for name in entry.names if entry.written else ():
            value = random(entry.stored, name, torch.float32 if entry.released_fp32 else torch.bfloat16)
            if entry.form is Form.padded:
                value[entry.shape[0] :] = 0
            if packed and entry.form is Form.experts:
                codes, scales = packed_names(name)
                tensors[codes], tensors[scales] = pack(value.float())
            else:
                tensors[name] = value
    if images:
        tensors |= {name: random(shape, name) for name, shape in vision_tensors(read_vision(VISION))}
    if packed:
        config["text_config"]["quantization_config"] = {"format": "mxfp4-pack-quantized"}
    if edit is not None:
        edit(tensors, config)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def refusal(tmp_path: Path, **how: Any) -> str:
    """What an import of the release says, which must leave nothing behind."""
    make_release(tmp_path / "release", **how)
    with pytest.raises(CheckpointError) as error:
        import_release(tmp_path / "release", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["release"]
    return str(error.value)


def test_packed_experts_are_unpacked_exactly(tmp_path: Path) -> None:
    tensors = make_release(tmp_path / "release", packed=True)
    import_release(tmp_path / "release", tmp_path / "out")
    kept = StoredTensors(tmp_path / "out").read("layers.1.ffn.experts.down")
    assert kept.dtype == torch.bfloat16
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for expert in range(3):
        codes, scales = (tensors[f"{MOE}.experts.{expert}.w2.weight_{part}"] for part in ("packed", "scale"))
        pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        values = levels[pairs & 7] * torch.where(pairs < 8, 1.0, -1.0)
        values = values * (scales.float() - 127).exp2().repeat_interleave(32, 1)
        assert torch.equal(kept[expert].T.float(), values)


def test_every_kind_of_fault_is_named(tmp_path: Path) -> None:
    def spoil(tensors: Tensors, _: Any) -> None:
        del tensors["language_model.model.norm.weight"]
        tensors["language_model.model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["language_model.lm_head.weight"] = torch.zeros(8, 15, dtype=torch.bfloat16)
        tensors[f"{MOE}.gate.weight"] = torch.zeros(3, 16, dtype=torch.float16)

    message = refusal(tmp_path, edit=spoil)
    assert [line.strip() for line in message.splitlines()[1:]] == [
        "language_model.model.norm.weight is missing",
        "language_model.model.layers.2.mlp.up_proj.weight is not in the model",
        f"{MOE}.gate.weight is F16, k3train reads BF16 or F32 there",
        "language_model.lm_head.weight has shape [8, 15], the model needs [8, 16]",
    ]


def test_twenty_faults_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    def spoil(tensors: Tensors, _: Any) -> None:
        tensors |= {f"extra.{i}": torch.zeros(1) for i in range(27)}

    lines = refusal(tmp_path, edit=spoil).splitlines()
    assert len(lines) == 22
    assert lines[-1].strip() == "and 7 more"


@pytest.mark.parametrize("name", [f"{MOE}.experts.2.w2.weight", "language_model.model.norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_go_neither_in_nor_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    def spoil(tensors: Tensors, _: Any) -> None:
        tensors[name].view(-1)[3] = value

    assert f"{name} holds NaN or infinity" in refusal(tmp_path, edit=spoil)
    monkeypatch.setattr(importing, "check_finite", lambda _, tensor: tensor)
    import_release(tmp_path / "release", tmp_path / "in")
    with pytest.raises(CheckpointError, match="holds NaN or infinity") as error:
        export_release(tmp_path / "in", tmp_path / "out")
    assert f"({name})" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "release"]


def test_a_config_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    make_release(tmp_path / "release")
    (tmp_path / "release" / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        import_release(tmp_path / "release", tmp_path / "out")


def test_padding_that_is_not_zero(tmp_path: Path) -> None:
    def spoil(tensors: Tensors, _: Any) -> None:
        tensors["language_model.model.layers.0.self_attn.A_log"][3] = 1e-30

    assert "A_log: values 2 to 3 must be zero padding, because the model has 2 heads" in refusal(
        tmp_path, edit=spoil
    )


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1)])
def test_a_log_without_padding_is_read_too(tmp_path: Path, shape: tuple[int, ...]) -> None:
    def cut(tensors: Tensors, _: Any) -> None:
        name = "language_model.model.layers.0.self_attn.A_log"
        tensors[name] = tensors[name][:2].reshape(shape).clone()

    tensors = make_release(tmp_path / "release", edit=cut)
    import_release(tmp_path / "release", tmp_path / "out")
    kept = StoredTensors(tmp_path / "out").read("layers.0.attention.A_log")
    assert torch.equal(kept, tensors["language_model.model.layers.0.self_attn.A_log"].flatten())


@pytest.mark.parametrize("part", ["weight_scale", "weight_packed"])
def test_half_of_a_packed_matrix(tmp_path: Path, part: str) -> None:
    def spoil(tensors: Tensors, _: Any) -> None:
        del tensors[f"{MOE}.experts.2.w3.{part}"]
        tensors[f"{MOE}.experts.1.w1.{part}"] = torch.zeros(32, 7, dtype=torch.uint8)

    message = refusal(tmp_path, packed=True, edit=spoil)
    assert f"{MOE}.experts.2.w3.{part} is missing" in message
    assert f"{MOE}.experts.1.w1.{part} has shape [32, 7]" in message


def test_a_tied_head_is_a_copy_of_the_embedding(tmp_path: Path) -> None:
    def tie(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors["language_model.lm_head.weight"]
        config["text_config"]["tie_word_embeddings"] = True

    tensors = make_release(tmp_path / "release", edit=tie)
    assert import_release(tmp_path / "release", tmp_path / "out").tied
    kept = StoredTensors(tmp_path / "out")
    for name in ("embedding.weight", "output_head.weight"):
        assert torch.equal(kept.read(name), tensors["language_model.model.embed_tokens.weight"])


def test_the_image_encoder_is_left_out_on_demand_and_put_back(tmp_path: Path) -> None:
    assert "leave it out with --text-only" in refusal(tmp_path, images=True)
    release = tmp_path / "release"
    import_release(release, tmp_path / "out", text_only=True)
    export_release(tmp_path / "out", tmp_path / "again", vision_from=release, like_release=True)
    first, second = load_file(release / "model.safetensors"), Release(tmp_path / "again")
    assert second.headers == Release(release).headers
    assert all(torch.equal(value, next(second.tensors([name]))) for name, value in first.items())
    assert second.config["vision_config"] == VISION


def test_an_image_encoder_of_another_shape_is_not_put_in(tmp_path: Path) -> None:
    def spoil(tensors: Tensors, _: Any) -> None:
        del tensors["mm_projector.post_norm.weight"]
        tensors["vision_tower.more"] = torch.zeros(1)
        tensors["vision_tower.encoder.final_layernorm.weight"] = torch.zeros(5, dtype=torch.bfloat16)

    make_release(tmp_path / "release", images=True, edit=spoil)
    import_release(tmp_path / "release", tmp_path / "out", text_only=True)
    with pytest.raises(CheckpointError) as error:
        export_release(tmp_path / "out", tmp_path / "again", vision_from=tmp_path / "release")
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "mm_projector.post_norm.weight is missing",
        "vision_tower.more is no part of the image encoder",
        "vision_tower.encoder.final_layernorm.weight is BF16 [5], vision_config asks for BF16 [4]",
    ]


def test_the_index_and_the_shards_must_agree(tmp_path: Path) -> None:
    tensors = make_release(tmp_path / "release")
    (tmp_path / "release" / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, tmp_path / "release" / "a.safetensors")
    save_file({name: tensors[name] for name in names[8:]}, tmp_path / "release" / "b.safetensors")
    weight_map = dict.fromkeys(names[1:9], "a.safetensors") | dict.fromkeys(names[9:], "b.safetensors")
    index = tmp_path / "release" / INDEX
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": "b.safetensors"}}))
    with pytest.raises(CheckpointError) as error:
        Release(tmp_path / "release")
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        f"{names[8]} is in a.safetensors and in b.safetensors",
        "ghost is in model.safetensors.index.json for b.safetensors, but not in that file",
        f"{names[8]} is in model.safetensors.index.json for a.safetensors, but not in that file",
        f"{names[0]} is not in model.safetensors.index.json",
    ]
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"points outside its folder: '../a.safetensors'"):
        Release(tmp_path / "release")
    index.write_text(json.dumps({"weight_map": {"x": "c.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"c.safetensors is missing"):
        Release(tmp_path / "release")


def test_pickled_weights_and_broken_files_are_refused(tmp_path: Path) -> None:
    make_release(tmp_path / "release")
    shard = tmp_path / "release" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        Release(tmp_path / "release")
    shard.rename(tmp_path / "release" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are refused"):
        Release(tmp_path / "release")
    (tmp_path / "release" / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config.json holds no mapping"):
        Release(tmp_path / "release")


def test_shards_are_what_the_library_reads(tmp_path: Path) -> None:
    """Odd numbers of bf16 values before fp32 ones would misalign them."""
    planned = [
        Planned(name=f"t{i}", dtype=dtype, shape=shape)
        for i, (dtype, shape) in enumerate(
            [(torch.bfloat16, (3,)), (torch.float32, (2, 2)), (torch.bfloat16, (5, 1)), (torch.uint8, (7,))]
        )
    ]
    shards = plan_shards(planned, 30)
    assert [[tensor.name for tensor in shard] for shard in shards] == [["t1", "t0"], ["t2", "t3"]]
    assert plan_shards(planned, 1) == [[tensor] for tensor in planned]
    values = {p.name: (random(p.shape, p.name).float() * 9).abs().to(p.dtype) for p in planned}
    write_shards(tmp_path, shards, lambda tensor: values[tensor.name])
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 + 16 + 10 + 7
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as shard:
            assert torch.equal(shard.get_tensor(name), values[name])
            assert shard.metadata() == {"format": "pt"}


WIDE = Model(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    vocab_size=8,
    num_dense_layers=0,
    precision=Precision.bf16,
    mla_layers=[],
    kda=Kda(head_dim=16, decay_rank=16),
    moe=Moe(num_experts=64, top_k=2, expert_ffn_size=512, latent_size=512, shared_ffn_size=16),
)
_M_MMAP_THRESHOLD = -3
LAYER_BYTES = 64 * 3 * 512 * 512 * 2
"""Experts of one layer, all but 0.1% of it."""


def _own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def _within(layers: float, work: Callable[[], Any]) -> bool:
    """Whether ``work`` succeeds while the process may have so much more memory of its own than it has now."""
    gc.collect()
    has = _own_bytes()
    holes = []
    while _own_bytes() == has:  # what malloc has kept of freed memory is used up first
        holes.append(torch.empty(1 << 20, dtype=torch.uint8))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_own_bytes() + int(layers * LAYER_BYTES), hard))
    try:
        work()
    except Exception:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return True


def _convert(rank: int, folder: Path) -> list[bool]:
    """An export and an import within half a layer, and an export within less than it can do with."""
    # Tensors as small as these malloc would keep when they are freed; those of a K3 layer it gives back.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 18)
    make_release(folder / "warm")  # loads what the first conversion of a process loads
    import_release(folder / "warm", folder / "warm-in")
    export_release(folder / "warm-in", folder / "warm-out")
    stored.CHUNK_BYTES = LAYER_BYTES // 200  # as much smaller than a layer as it is for K3

    def export(name: str) -> Any:
        # A shard that is read is mapped, which counts though it takes no memory.
        return export_release(folder / "checkpoint", folder / name, shard_bytes=LAYER_BYTES // 8)

    return [
        _within(0.5, lambda: export("release")),
        _within(0.5, lambda: import_release(folder / "release", folder / "back")),
        _within(0.05, lambda: export("impossible")),
    ]


def test_never_more_than_one_layer_is_in_memory(tmp_path: Path) -> None:
    def new(entry: Any) -> NewTensor:
        dtype = torch.float32 if entry.fp32 else torch.bfloat16

        def make(first: int, last: int) -> Tensor:
            return torch.ones((last - first, *entry.shape[1:]), dtype=dtype)

        return NewTensor(entry.ours, entry.shape, dtype, make, cut=False)

    state = {"step": 1, "settings": {"model": to_plain(WIDE)}}
    files = [[new(entry) for entry in table(WIDE)]]
    write_checkpoint(tmp_path / "checkpoint", files, train_state=state, more={})
    assert run_ranks(1, _convert, tmp_path)[0] == [True, True, False]
