"""config.json of a release to a model group and back. No torch.

What the release has a key for stands there, and only there. What it has none for stands under ``k3train`` in
the same file, by its key in the model group, so that a round trip loses nothing and the release's own keys
always mean what they mean in a release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from k3train.checkpoint.hf.names import MXFP4_GROUP, Layout
from k3train.checkpoint.hf.problems import raise_all
from k3train.config.build import Builder, to_plain
from k3train.config.ranges import range_problems
from k3train.config.schema import Model, Precision, Run
from k3train.plan.counts import kda_layers, mla_layers

OWN_SECTION = "k3train"

_FIXED: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "linear_attn_config.use_full_rank_gate": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}
"""Choices of the release that k3train has no setting for: another value is another architecture."""
_MAY_BE_ABSENT = frozenset(
    "model_type moe_layer_freq moe_renormalize moe_router_activation_func num_expert_group "
    "routed_scaling_factor topk_group topk_method use_grouped_topk".split()
)
"""Of those, what the release's configuration class fills in with the value above."""

_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "vocab_size": "vocab_size",
    "first_k_dense_replace": "num_dense_layers",
    "intermediate_size": "dense_ffn_size",
    "rms_norm_eps": "norm_eps",
    "linear_attn_config.head_dim": "kda.head_dim",
    "linear_attn_config.short_conv_kernel_size": "kda.conv_kernel",
    "linear_attn_config.gate_lower_bound": "kda.gate_lower_bound",
    "q_lora_rank": "mla.q_lora_rank",
    "kv_lora_rank": "mla.kv_lora_rank",
    "qk_nope_head_dim": "mla.qk_head_dim",
    "qk_rope_head_dim": "mla.qk_shared_head_dim",
    "v_head_dim": "mla.v_head_dim",
    "attn_res_block_size": "attn_res.block_layers",
    "num_experts": "moe.num_experts",
    "num_experts_per_token": "moe.top_k",
    "moe_intermediate_size": "moe.expert_ffn_size",
    "routed_expert_hidden_size": "moe.latent_size",
    "num_shared_experts": "moe.num_shared_experts",
    "activation_situ_beta": "situ.gate_cap",
    "activation_situ_linear_beta": "situ.up_cap",
}
"""Key below ``text_config`` to key below ``model``: the same number under another name."""
_OPTIONAL: dict[str, tuple[str, Any]] = {
    "initializer_range": ("init_std", 0.02),
    "latent_moe_use_norm": ("moe.latent_norm", False),
    "num_nextn_predict_layers": ("mtp.num_layers", 0),
}
"""As ``_SIZES``, with the value of the release's configuration class where the key is absent."""

_HAVE_A_KEY = frozenset({*_SIZES.values(), *(ours for ours, _ in _OPTIONAL.values()), "precision"})
"""Settings that may not stand in ``k3train``: the release's own key would be overruled."""

_ALSO_READ = frozenset(
    "linear_attn_config.full_attn_layers linear_attn_config.kda_layers linear_attn_config.num_heads "
    "num_key_value_heads dtype torch_dtype tie_word_embeddings quantization_config "
    "architectures k3train".split()
)
_WITHOUT_EFFECT = frozenset(
    "auto_map bos_token_id eos_token_id pad_token_id media_placeholder_token_id max_position_embeddings "
    "model_max_length transformers_version use_cache _name_or_path head_dim num_return_sequences".split()
)
"""Keys that say nothing about weights or how they are multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseConfig:
    """What config.json tells."""

    model: Model
    layout: Layout
    packed: bool
    """Routed experts are stored in MXFP4."""
    tied: bool
    """The output head is the embedding."""
    vision: dict[str, Any] | None
    """``vision_config``, when there is one."""
    unused: list[str] = field(default_factory=list[str])
    """Keys whose meaning is unknown here and that were not looked at."""


def from_config(config: Mapping[str, Any]) -> ReleaseConfig:
    """The model that a release's config.json describes.

    Raises CheckpointError with every key that is missing, or asks for what k3train does not compute.
    """
    layout = Layout.k3 if "text_config" in config else Layout.kimi_linear
    part = config["text_config"] if layout is Layout.k3 else config
    raise_all("config.json cannot be used", [*_no_sections(config), *_no_sections(part)])
    text = _flat(part)
    problems = [*_fixed_problems(text), *_missing(text)]
    packed = _packed(text.get("quantization_config") or config.get("quantization_config"), problems)
    precision = _precision(text.get("dtype", text.get("torch_dtype", config.get("dtype"))), problems)
    raise_all("config.json is of a model that k3train does not compute", problems)
    plain = _official(text, precision)
    own = config.get(OWN_SECTION) or {}
    problems = [f"{OWN_SECTION}.{key}: the release has a key for that" for key in own if key in _HAVE_A_KEY]
    raise_all("config.json gives no usable model", problems)
    for key, value in own.items():
        _put(plain, key, value)
    builder = Builder()
    run = builder.build({"model": plain})
    model = run.model
    problems = [str(problem) for problem in builder.problems] or _outside(run, own)
    if not problems and mla_layers(model) != _mla_layers(text):
        problems.append(f"{OWN_SECTION}: mla_every and mla_layers are not those of full_attn_layers")
    raise_all("config.json gives no usable model", problems)
    known = {*_FIXED, *_SIZES, *_OPTIONAL, *_ALSO_READ, *_WITHOUT_EFFECT}
    return ReleaseConfig(
        model=model,
        layout=layout,
        packed=packed,
        tied=bool(text.get("tie_word_embeddings", False)),
        vision=config.get("vision_config"),
        unused=sorted(key for key, value in text.items() if key not in known and value not in _NOTHING),
    )


_NOTHING = (None, False, 0, 0.0, "", [], {})


def to_config(
    model: Model,
    layout: Layout,
    *,
    precision: Precision,
    vision: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """config.json of a release of ``model`` whose matrices are stored in ``precision``.

    ``vision`` is another release's ``vision_config``, ``max_tokens`` the longest context trained on.
    """
    plain = to_plain(model)
    official: dict[str, Any] = {key: _get(plain, ours) for key, ours in _SIZES.items()}
    official |= {key: _get(plain, ours) for key, (ours, _) in _OPTIONAL.items()} | _FIXED
    official |= {
        "dtype": _DTYPES[precision],
        "num_key_value_heads": model.num_heads,
        "linear_attn_config.num_heads": model.num_heads,
        "linear_attn_config.full_attn_layers": [layer + 1 for layer in mla_layers(model)],
        "linear_attn_config.kda_layers": [layer + 1 for layer in kda_layers(model)],
        "tie_word_embeddings": False,
    }
    if max_tokens is not None:
        official["max_position_embeddings"] = max_tokens
    text = _nested(official)
    own = own_settings(model, precision)
    section = {OWN_SECTION: own} if own else {}
    if layout is Layout.kimi_linear:
        return {"architectures": ["KimiLinearForCausalLM"], **text, **section}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": _DTYPES[precision],
        "tie_word_embeddings": False,
        "text_config": text,
        **({"vision_config": dict(vision)} if vision is not None else {}),
        **section,
    }


def own_settings(model: Model, precision: Precision) -> dict[str, Any]:
    """Settings of ``model``, by key, that the release has no key for and that differ from what it implies."""
    plain = to_plain(model)
    official = {key: _get(plain, ours) for key, ours in _SIZES.items()}
    official |= {key: _get(plain, ours) for key, (ours, _) in _OPTIONAL.items()}
    official["linear_attn_config.full_attn_layers"] = [layer + 1 for layer in mla_layers(model)]
    implied = dict(_leaves(_official(official, precision)))
    of_a_run = ("precision", "fp8")  # what is stored does not depend on them
    return {key: value for key, value in _leaves(plain) if key not in of_a_run and value != implied[key]}


_DTYPES = {Precision.bf16: "bfloat16", Precision.fp32: "float32"}


def _official(text: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """The model group, as plain data, that the release's own keys stand for."""
    plain = to_plain(Model())
    for key, ours in _SIZES.items():
        _put(plain, ours, text[key])
    for key, (ours, default) in _OPTIONAL.items():
        _put(plain, ours, text.get(key, default))
    plain["precision"] = precision.name
    plain["kda"]["decay_rank"] = plain["kda"]["head_dim"]
    plain["kda"]["norm_eps"] = plain["norm_eps"]
    plain["moe"]["shared_ffn_size"] = plain["moe"]["expert_ffn_size"]
    plain |= _pattern(_mla_layers(text), plain["num_layers"])
    return plain


def _mla_layers(text: Mapping[str, Any]) -> list[int]:
    """From 0, ascending; the release counts from 1."""
    return sorted(layer - 1 for layer in text["linear_attn_config.full_attn_layers"])


def _outside(run: Run, own: Mapping[str, Any]) -> list[str]:
    """Numbers outside their range, by their key in config.json."""
    keys = {f"model.{ours}": key for key, ours in _SIZES.items()}
    keys |= {f"model.{ours}": key for key, (ours, _) in _OPTIONAL.items()}
    keys |= {f"model.{key}": f"{OWN_SECTION}.{key}" for key in own}
    found = [problem for problem in range_problems(run) if problem.key in keys]
    return [str(replace(problem, key=keys[problem.key])) for problem in found]


def _pattern(layers: list[int], num_layers: int) -> dict[str, Any]:
    """``mla_every`` when its rule gives these MLA layers, else the list itself."""
    every = layers[0] + 1 if layers else 0
    ruled = [layer for layer in range(num_layers) if every and (layer + 1) % every == 0]
    if layers and layers == sorted({*ruled, num_layers - 1}):
        return {"mla_every": every, "mla_layers": None}
    return {"mla_layers": layers}


def _no_sections(part: Any) -> list[str]:
    if not isinstance(part, Mapping):
        return ["text_config is no mapping of keys"]
    names = ("linear_attn_config", "quantization_config", "vision_config", OWN_SECTION)
    wrong = [name for name in names if not isinstance(part.get(name) or {}, Mapping)]
    return [f"{name} is no mapping of keys" for name in wrong]


def _fixed_problems(text: Mapping[str, Any]) -> list[str]:
    fixed = {**_FIXED, "num_key_value_heads": text.get("num_attention_heads")}
    fixed["linear_attn_config.num_heads"] = text.get("num_attention_heads")
    problems = []
    for key, value in fixed.items():
        if key not in text and key not in _MAY_BE_ABSENT:
            problems.append(f"{key} is missing; k3train computes {value!r}")
        elif key in text and text[key] != value:
            problems.append(f"{key} = {text[key]!r}; k3train computes {value!r} only")
    return problems + _layer_problems(text)


def _layer_problems(text: Mapping[str, Any]) -> list[str]:
    """Each layer, counted from 1, is in exactly one of the two lists."""
    count = text.get("num_hidden_layers")
    lists = [text.get(f"linear_attn_config.{name}") for name in ("full_attn_layers", "kda_layers")]
    if count is None or None in lists:
        return []  # reported as missing
    if type(count) is not int:
        return [f"num_hidden_layers = {count!r} is no whole number"]
    layers = [layer for each in lists if isinstance(each, list) for layer in each]
    whole = len(layers) == max(count, 0) and all(type(layer) is int for layer in layers)
    if not whole or sorted(layers) != [*range(1, count + 1)]:
        return [f"linear_attn_config: full_attn_layers and kda_layers do not share layers 1 to {count}"]
    return []


def _missing(text: Mapping[str, Any]) -> list[str]:
    needed = [*_SIZES, "linear_attn_config.full_attn_layers", "linear_attn_config.kda_layers"]
    return [f"{key} is missing" for key in needed if text.get(key) is None]


def _packed(scheme: Any, problems: list[str]) -> bool:
    """Whether experts are packed; a scheme other than the release's is a problem."""
    if not scheme:
        return False
    groups = scheme.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    sizes = [(each.get("num_bits", 4), each.get("group_size", MXFP4_GROUP)) for each in weights]
    if scheme.get("format") != "mxfp4-pack-quantized" or any(size != (4, MXFP4_GROUP) for size in sizes):
        problems.append(
            f"quantization_config: {scheme.get('format')!r} with (bits, group) {sizes}; k3train reads "
            f"'mxfp4-pack-quantized' with (4, {MXFP4_GROUP})"
        )
    return True


def _precision(dtype: Any, problems: list[str]) -> Precision:
    for precision, name in _DTYPES.items():
        if dtype == name:
            return precision
    problems.append(f"dtype = {dtype!r}; k3train reads {' and '.join(map(repr, _DTYPES.values()))}")
    return Precision.bf16


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the text model, those of ``linear_attn_config`` with its name in front."""
    linear = config.get("linear_attn_config") or {}
    flat = {key: value for key, value in config.items() if key != "linear_attn_config"}
    return flat | {f"linear_attn_config.{key}": value for key, value in linear.items()}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        _put(tree, key, value)
    return tree


def _get(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        node = node[part]
    return node


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _leaves(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        found += _leaves(value, key) if isinstance(value, Mapping) else [(key, value)]
    return found
