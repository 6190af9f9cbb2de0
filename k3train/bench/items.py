"""What can be measured, at which shapes, and against whom. No torch, so that listing is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3train.bench import work
from k3train.bench.work import Counting, Pair, Shape
from k3train.config.compose import compose
from k3train.config.keys import closest_word
from k3train.config.problems import BadInput

OURS = "k3train"
PEERS = {"fla": "fla-core", "automodel": "nemo-automodel", "megatron": "megatron-core"}
"""Names of peers and of the packages that hold them."""
LARGEST = 2**40
"""No size that could be meant is above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that can be measured."""

    what: str
    """For the list, one line."""
    on_gpu: tuple[Shape, ...]
    """Shapes measured on a GPU when none are given; the first also says which sizes there are."""
    on_cpu: Shape
    """The shape measured on the CPU when none is given."""
    peers: Mapping[str, str]
    """The peers that have such a part, and what of theirs is measured."""
    count: Counting
    routed: bool = False
    """Whether tokens choose experts in it."""


def _whole_model(shape: Shape, size: int) -> Pair:
    return work.whole_model(compose([f"experiment={model_experiment(shape)}"]).model, shape, size)


def model_experiment(shape: Shape) -> str:
    """The experiment whose model is meant: the proxy of 4.4 billion parameters or the debug model."""
    return "proxy_gpu" if shape["proxy"] else "debug"


ITEMS: dict[str, Item] = {
    "kda": Item(
        what="Kimi Delta Attention: gate, cumulative sum, l2 norms and beta inside",
        on_gpu=(
            {"tokens": 8192, "heads": 96, "documents": 1, "batch": 1, "head_dim": 128},
            {"tokens": 65536, "heads": 16, "documents": 16, "batch": 1, "head_dim": 128},
            {"tokens": 131072, "heads": 16, "documents": 1, "batch": 1, "head_dim": 128},
        ),
        on_cpu={"tokens": 256, "heads": 2, "documents": 1, "batch": 1, "head_dim": 32},
        peers={"fla": "chunk_kda, all flags inside the kernel", "automodel": "fused_chunk_kda and its gate"},
        count=work.kda,
    ),
    "attn_res": Item(
        what="attention residuals: softmax over depth of several sources",
        on_gpu=(
            {"tokens": 8192, "hidden": 7168, "sources": 9},
            {"tokens": 8192, "hidden": 7168, "sources": 5},
        ),
        on_cpu={"tokens": 256, "hidden": 64, "sources": 4},
        peers={"fla": "fused_attnres", "automodel": "Triton mix of stacked blocks"},
        count=work.attn_res,
    ),
    "router": Item(
        what="router: logits, sigmoid, top-(k+1), loads and the balance histogram",
        on_gpu=({"tokens": 8192, "experts": 896, "top_k": 16, "bins": 1000, "hidden": 7168},),
        on_cpu={"tokens": 256, "experts": 16, "top_k": 4, "bins": 50, "hidden": 64},
        peers={
            "automodel": "KimiK3Gate, which neither counts nor balances",
            "megatron": "quantile mode on logits",
        },
        count=work.router,
        routed=True,
    ),
    "situ": Item(
        what="SiTU-GLU with a weight for each row",
        on_gpu=({"rows": 131072, "channels": 3072},),
        on_cpu={"rows": 256, "channels": 64},
        peers={"automodel": "weighted SiTU in Triton, fast math"},
        count=work.situ,
    ),
    "experts": Item(
        what="routed experts, tokens to tokens: sort, permute, gate and up, SiTU-GLU, down, unpermute",
        on_gpu=(
            {"tokens": 8192, "experts": 112, "top_k": 16, "latent": 3584, "ffn": 3072},
            {"tokens": 8192, "experts": 128, "top_k": 8, "latent": 1024, "ffn": 768},
        ),
        on_cpu={"tokens": 64, "experts": 4, "top_k": 2, "latent": 16, "ffn": 24},
        peers={
            "automodel": "GroupedExperts, torch_mm",
            "megatron": "permute, SequentialMLP, unpermute, SwiGLU",
        },
        count=work.experts,
        routed=True,
    ),
    "conv": Item(
        what="causal depth-wise convolution and SiLU",
        on_gpu=({"tokens": 8192, "channels": 12288, "width": 4, "documents": 1},),
        on_cpu={"tokens": 256, "channels": 32, "width": 4, "documents": 1},
        peers={"fla": "causal_conv1d, Triton"},
        count=work.conv,
    ),
    "cross_entropy": Item(
        what="cross entropy from hidden states, the head's product inside",
        on_gpu=({"tokens": 8192, "hidden": 7168, "vocab": 163840},),
        on_cpu={"tokens": 64, "hidden": 32, "vocab": 512},
        peers={
            "fla": "fused_linear_cross_entropy_loss",
            "automodel": "ChunkedCrossEntropy, compiled",
            "megatron": "product, then fused_vocab_parallel_cross_entropy",
        },
        count=work.cross_entropy,
    ),
    "mla": Item(
        what="causal attention of MLA, query and key channels unlike value channels",
        on_gpu=({"tokens": 8192, "heads": 96, "documents": 1, "qk": 192, "v": 128},),
        on_cpu={"tokens": 128, "heads": 2, "documents": 1, "qk": 24, "v": 16},
        peers={
            "automodel": "scaled_dot_product_attention, its sdpa backend",
            "megatron": "DotProductAttention, unfused",
        },
        count=work.mla,
    ),
    "model": Item(
        what="whole model, forward and backward, without an optimizer; proxy=1: 4.4 B parameters, 0: debug",
        on_gpu=({"tokens": 8192, "documents": 1, "proxy": 1},),
        on_cpu={"tokens": 64, "documents": 1, "proxy": 0},
        peers={"automodel": "KimiK3ForCausalLM of the same shape, fused and Triton kernels"},
        count=_whole_model,
        routed=True,
    ),
}


def find(names: str) -> list[str]:
    """The items with these names, separated by commas; ``all``: every one. Raises BadInput for others."""
    if names == "all":
        return list(ITEMS)
    for name in names.split(","):
        if name not in ITEMS:
            near = closest_word(name, ITEMS)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(ITEMS)} and all"
            raise BadInput(f"{name!r} cannot be benchmarked; {hint}")
    return list(dict.fromkeys(names.split(",")))


def read_shape(item: str, text: str, device: str) -> dict[str, int]:
    """``tokens=8192,heads=16`` as a whole shape of ``item``; sizes left out are those of the default.

    Raises BadInput naming the word that is no size, or the sizes that do not fit together.
    """
    shape, given = dict(default_shapes(item, device)[0]), set[str]()
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in shape:
            near = closest_word(name, shape)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(shape)}"
            raise BadInput(f"--shape {part}: {item} has no size {name!r}; {hint}")
        if name in given:
            raise BadInput(f"--shape {text}: {name} is given twice; give it once, or --shape once for each")
        given.add(name)
        shape[name] = _size(name, value, part)
    _check(item, shape, text)
    return shape


def _size(name: str, value: str, part: str) -> int:
    least = 0 if name == "proxy" else 1
    digits = value.isascii() and value.isdigit() and len(value) < 100
    if not digits or not least <= int(value) <= LARGEST:
        raise BadInput(f"--shape {part}: {name} must be a whole number from {least} to {LARGEST}")
    return int(value)


def read_audited(texts: list[str] | None, device: str) -> dict[str, int]:
    """The one shape of an audit of kda: of ``texts``, what ``--shape`` gave, or its own. Raises BadInput."""
    if texts and len(texts) > 1:
        raise BadInput(f"--shape {texts[1]}: an audit is of one shape; give --shape once")
    default = "tokens=512,heads=64,head_dim=128" if device == "cuda" else "tokens=192,heads=2,head_dim=32"
    text = texts[0] if texts else default
    shape = read_shape("kda", text, device)
    if texts and shape["documents"] > 1:
        raise BadInput(f"--shape {text}: an audit is of one document; leave documents out")
    if shape["tokens"] < work.KDA_CHUNK:
        raise BadInput(
            f"--shape {text}: an audit needs a chunk at least; use tokens={work.KDA_CHUNK} or more"
        )
    return shape


def _check(item: str, shape: Shape, text: str) -> None:
    documents, batch = shape.get("documents", 1), shape.get("batch", 1)
    if item != "model" and shape.get("tokens", documents) % documents:
        raise BadInput(f"--shape {text}: tokens={shape['tokens']} are not divisible by documents={documents}")
    if documents > 1 and batch > 1:
        raise BadInput(f"--shape {text}: documents lie in one row; use batch=1 or documents=1")
    if "top_k" in shape and shape["top_k"] >= shape["experts"]:
        raise BadInput(f"--shape {text}: top_k={shape['top_k']} must be below experts={shape['experts']}")
    if shape.get("proxy", 0) > 1:
        raise BadInput(f"--shape {text}: proxy must be 0 (debug model) or 1 (proxy model)")


def default_shapes(item: str, device: str) -> tuple[Shape, ...]:
    """What is measured on ``device`` when no shape is given."""
    return ITEMS[item].on_gpu if device == "cuda" else (ITEMS[item].on_cpu,)


def shape_words(shape: Shape) -> str:
    """A shape as one types it."""
    return ",".join(f"{name}={size}" for name, size in shape.items())
