"""Counted work of what is measured, and the time it needs at least. No torch.

Bytes count every input once and every output once; FLOPs count matrix products, a multiply-add as 2. What an
implementation reads again, keeps between kernels or recomputes is its own affair and not in the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from k3train.config.schema import Model
from k3train.plan.counts import count_parameters, train_flops_per_token

Shape = Mapping[str, int]
KDA_CHUNK = 64
"""Tokens of a chunk in the counts of KDA; the fastest forms known use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs and bytes of one call."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)

    def floor_ms(self, copy_gb_s: float, matmul_tflop_s: float) -> float:
        """Milliseconds below which no implementation gets on a machine with these two ceilings."""
        return max(self.bytes / copy_gb_s / 1e6, self.flops / matmul_tflop_s / 1e9)


Pair = tuple[Work, Work]
"""Forward and backward."""
Counting = Callable[[Shape, int], Pair]
"""From a shape and the bytes of one activation."""


def kda(s: Shape, size: int) -> Pair:
    """q, k, v, z, beta in, o out; backward reads those but o, and do, and writes five gradients.

    FLOPs per token and head: 2 (4 C D + 3 D^2), backward with its recomputation 2 (11 C D + 8 D^2).
    """
    c, d, n = KDA_CHUNK, s["head_dim"], s["tokens"] * s["batch"] * s["heads"]
    forward = Work(flops=2.0 * n * (4 * c * d + 3 * d * d), bytes=float(n * size * (5 * d + 1)))
    return forward, Work(flops=2.0 * n * (11 * c * d + 8 * d * d), bytes=float(n * size * (9 * d + 2)))


def attn_res(s: Shape, size: int) -> Pair:
    """Sources in, their mix out; backward reads sources and gradient, writes a gradient for each source."""
    w, elements = s["sources"], s["tokens"] * s["hidden"]
    forward = Work(flops=4.0 * w * elements, bytes=float(size * (w + 1) * elements))
    return forward, Work(flops=8.0 * w * elements, bytes=float(size * (2 * w + 1) * elements))


def router(s: Shape, size: int) -> Pair:
    """Tokens and fp32 weight in; experts (int64), fp32 weights and the int32 histogram out."""
    n, e, h = s["tokens"], s["experts"], s["hidden"]
    product, inputs = 2.0 * n * e * h, size * n * h + 4 * e * h
    forward = Work(flops=product, bytes=float(inputs + 12 * n * s["top_k"] + 4 * e * s["bins"]))
    return forward, Work(flops=2 * product, bytes=float(2 * inputs + 4 * n * s["top_k"]))


def situ(s: Shape, size: int) -> Pair:
    """Gate, up and a weight for each row in, one out; backward reads them and a gradient, writes two."""
    elements = s["rows"] * s["channels"]
    return (
        Work(flops=0.0, bytes=float(3 * size * elements)),
        Work(flops=0.0, bytes=float(5 * size * elements)),
    )


def experts(s: Shape, size: int) -> Pair:
    """Tokens to tokens: rows to their experts, gate and up, SiTU-GLU with the weight, down, sum by token."""
    n, matrix = s["tokens"], s["latent"] * s["ffn"]
    product = 6.0 * n * s["top_k"] * matrix
    weights, tokens = 3 * size * s["experts"] * matrix, size * n * s["latent"]
    forward = Work(flops=product, bytes=float(weights + 2 * tokens))
    return forward, Work(flops=2 * product, bytes=float(2 * weights + 3 * tokens))


def conv(s: Shape, size: int) -> Pair:
    """One tensor in, one out; backward reads input and gradient and writes one."""
    elements = s["tokens"] * s["channels"]
    taps = 2.0 * s["width"] * elements
    return Work(flops=taps, bytes=float(2 * size * elements)), Work(
        flops=2 * taps, bytes=float(3 * size * elements)
    )


def cross_entropy(s: Shape, size: int) -> Pair:
    """Hidden states and the head's weight in; the backward writes a gradient for each."""
    product = 2.0 * s["tokens"] * s["hidden"] * s["vocab"]
    inputs = size * s["hidden"] * (s["tokens"] + s["vocab"])
    return Work(flops=product, bytes=float(inputs)), Work(flops=2 * product, bytes=float(2 * inputs))


def mla(s: Shape, size: int) -> Pair:
    """Causal attention by document: two products forward, five backward with the scores made again."""
    length, qk, v = s["tokens"] // s["documents"], s["qk"], s["v"]
    pairs, rows = float(s["heads"] * s["tokens"] * length), s["tokens"] * s["heads"] * size
    forward = Work(flops=pairs * (qk + v), bytes=float(rows * (2 * qk + 2 * v)))
    return forward, Work(flops=pairs * (3 * qk + 2 * v), bytes=float(rows * (4 * qk + 4 * v)))


def whole_model(model: Model, s: Shape, size: int) -> Pair:
    """FLOPs of ``plan.counts``; parameters read in each direction, and a gradient for each written."""
    tokens = s["tokens"] * s["documents"]
    forward = train_flops_per_token(model, s["tokens"]) * tokens / 3
    parameters = float(size * count_parameters(model).total)
    return Work(flops=forward, bytes=parameters), Work(flops=2 * forward, bytes=2 * parameters)
