"""The table of names against the released headers of Kimi K3, and against itself."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from k3train.checkpoint.hf.names import Entry, Form, Layout, packed_names, packed_shapes, table
from k3train.checkpoint.hf.vision import PREFIXES, read_vision, vision_tensors
from k3train.config.compose import compose
from k3train.plan.counts import count_parameters

VISION_CONFIG = {
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "qkv_hidden_size": 1536,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "text_hidden_size": 7168,
}
PER_KDA_LAYER = """A_log dt_bias q_conv1d.weight k_conv1d.weight v_conv1d.weight o_norm.weight q_proj.weight
    k_proj.weight v_proj.weight b_proj.weight f_a_proj.weight f_b_proj.weight""".split()
PER_MLA_LAYER = """q_a_proj.weight q_a_layernorm.weight q_b_proj.weight kv_a_proj_with_mqa.weight
    kv_a_layernorm.weight kv_b_proj.weight""".split()
PER_MOE_LAYER = """gate.weight gate.e_score_correction_bias routed_expert_down_proj.weight
    routed_expert_norm.weight routed_expert_up_proj.weight shared_experts.gate_proj.weight
    shared_experts.up_proj.weight shared_experts.down_proj.weight""".split()
PER_LAYER = """self_attention_res_norm.weight self_attention_res_proj.weight mlp_res_norm.weight
    mlp_res_proj.weight input_layernorm.weight post_attention_layernorm.weight self_attn.g_proj.weight
    self_attn.o_proj.weight""".split()
"""k3 spec section 1.2; both kinds of attention have a gate and an output projection."""
LAYER = "language_model.model.layers.#."


def released(entries: list[Entry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) by name of everything that the release of the text model holds."""
    found = {}
    for entry in entries:
        for name in entry.names if entry.written else ():
            if entry.form is Form.experts:
                shapes = packed_shapes(entry.stored)
                found |= {n: ("U8", shape) for n, shape in zip(packed_names(name), shapes, strict=True)}
            else:
                found[name] = ("F32" if entry.released_fp32 else "BF16", entry.stored)
    return found


@pytest.fixture(scope="module")
def k3() -> list[Entry]:
    return table(compose(["model=k3"]).model)


@pytest.fixture(scope="module")
def tensors(k3: list[Entry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return released(k3) | {n: ("BF16", s) for n, s in vision_tensors(read_vision(VISION_CONFIG))}


def test_the_release_of_k3_has_497220_tensors_of_the_released_size(tensors, k3) -> None:
    assert len(tensors) == 497_220
    width = {"BF16": 2, "F32": 4, "U8": 1}
    size = sum(math.prod(shape) * width[dtype] for dtype, shape in tensors.values())
    assert size / 1e12 == pytest.approx(1.56, abs=0.005)
    text = sum(math.prod(entry.stored) * len(entry.names) for entry in k3 if entry.written)
    images = sum(math.prod(shape) for name, (_, shape) in tensors.items() if name.startswith(PREFIXES))
    assert text + images == 2_779_931_837_184


def test_patterns_of_names_and_how_often_each_occurs(tensors) -> None:
    number = re.compile(r"\.\d+(?=\.)")
    seen = Counter(number.sub(".#", name) for name in tensors)
    expected: Counter[str] = Counter({f"{LAYER}{name}": 93 for name in PER_LAYER})
    expected += Counter({f"{LAYER}self_attn.{name}": 69 for name in PER_KDA_LAYER})
    expected += Counter({f"{LAYER}self_attn.{name}": 24 for name in PER_MLA_LAYER})
    expected += Counter({f"{LAYER}block_sparse_moe.{name}": 92 for name in PER_MOE_LAYER})
    for part in ("weight_packed", "weight_scale"):
        for matrix in ("w1", "w2", "w3"):
            expected[f"{LAYER}block_sparse_moe.experts.#.{matrix}.{part}"] = 92 * 896
    for part in ("gate", "up", "down"):
        expected[f"{LAYER}mlp.{part}_proj.weight"] = 1
    for name in ("embed_tokens", "norm", "output_attn_res_norm", "output_attn_res_proj"):
        expected[f"language_model.model.{name}.weight"] = 1
    expected["language_model.lm_head.weight"] = 1
    text = Counter({name: count for name, count in seen.items() if not name.startswith(PREFIXES)})
    assert text == expected
    mixes = [name for name in tensors if "_res_" in name]
    assert len(mixes) == 374
    assert sum(name.startswith(PREFIXES) for name in tensors) == 27 * 6 + 3 + 3


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.self_attn.A_log", "F32", (128,)),
        ("layers.0.self_attn.dt_bias", "F32", (12288,)),
        ("layers.0.self_attn.q_conv1d.weight", "F32", (12288, 1, 4)),
        ("layers.0.self_attn.f_a_proj.weight", "BF16", (128, 7168)),
        ("layers.0.self_attn.f_b_proj.weight", "BF16", (12288, 128)),
        ("layers.0.self_attn.b_proj.weight", "BF16", (96, 7168)),
        ("layers.0.self_attn.o_norm.weight", "F32", (128,)),
        ("layers.0.mlp.down_proj.weight", "BF16", (7168, 33792)),
        ("layers.0.mlp_res_proj.weight", "BF16", (1, 7168)),
        ("layers.3.self_attn.q_b_proj.weight", "BF16", (18432, 1536)),
        ("layers.3.self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, 7168)),
        ("layers.92.self_attn.kv_b_proj.weight", "BF16", (24576, 512)),
        ("layers.92.self_attn.g_proj.weight", "BF16", (12288, 7168)),
        ("layers.1.block_sparse_moe.gate.e_score_correction_bias", "F32", (896,)),
        ("layers.1.block_sparse_moe.routed_expert_up_proj.weight", "BF16", (7168, 3584)),
        ("layers.1.block_sparse_moe.shared_experts.down_proj.weight", "BF16", (7168, 6144)),
        ("layers.1.block_sparse_moe.experts.895.w1.weight_packed", "U8", (3072, 1792)),
        ("layers.1.block_sparse_moe.experts.895.w1.weight_scale", "U8", (3072, 112)),
        ("layers.1.block_sparse_moe.experts.895.w2.weight_packed", "U8", (3584, 1536)),
        ("layers.1.block_sparse_moe.experts.895.w2.weight_scale", "U8", (3584, 96)),
    ],
)
def test_headers_of_k3(tensors, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert tensors[f"language_model.model.{name}"] == (dtype, shape)


@pytest.mark.parametrize(
    "preset", ["debug", "debug model.moe.router.input=latent", "k3_3b", "k3_proxy", "k3_48b", "k3"]
)
def test_every_parameter_of_a_preset_is_in_the_table(preset: str) -> None:
    model = compose([*f"model={preset}".split(), "model.mtp.num_layers=1"]).model
    entries = table(model)
    assert sum(math.prod(e.shape) for e in entries if e.written) == count_parameters(model).total
    assert len({entry.ours for entry in entries}) == len(entries)
    names = [name for entry in entries if entry.written for name in entry.names]
    assert len(set(names)) == len(names)


def test_kimi_linear_s_layout_has_no_wrapper_and_no_padding() -> None:
    model = compose(["model=debug"]).model
    plain, wrapped = table(model, Layout.kimi_linear), table(model, Layout.k3)
    assert [f"language_model.{name}" for e in plain for name in e.names] == [
        name for e in wrapped for name in e.names
    ]
    differ = {a.ours for a, b in zip(plain, wrapped, strict=True) if a.stored != b.stored}
    assert differ == {entry.ours for entry in plain if entry.ours.endswith("A_log")}
