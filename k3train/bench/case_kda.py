"""Kimi Delta Attention: k3train's path of this machine, fla-core and NeMo Automodel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3train.bench.kda_inputs import kda_inputs
from k3train.bench.place import Cannot, Case, Place
from k3train.bench.work import Shape
from k3train.kernels.kda.choose import choose, kda
from k3train.kernels.kda.triton_kda import Keep
from k3train.kernels.packing import make_packing

BOUND = -5.0


def case(by: str, s: Shape, place: Place) -> Case:
    """Random inputs of the regime ``mixed``; documents of equal length."""
    sizes = s["batch"], s["tokens"], s["heads"], s["head_dim"]
    x = kda_inputs("mixed", sizes, device=place.device, dtype=place.dtype)
    do = torch.randn_like(x[2])
    n = s["documents"]
    borders = tuple(s["tokens"] * i // n for i in range(n + 1)) if n > 1 else None
    if by == "k3train":
        return _ours(x, do, borders, place)
    run, note = {"fla": _fla, "automodel": _automodel}[by](x, borders, place)
    return Case(forward=run, both=lambda: torch.autograd.grad(run(), x, do), note=note)


def _ours(x: list[Tensor], do: Tensor, borders: tuple[int, ...] | None, place: Place) -> Case:
    packing = None
    if borders is not None:
        packing = make_packing(borders, torch.ones(borders[-1], dtype=torch.bool), device=place.device)
    fast, reason = choose(place.device, place.dtype, x[0].shape[-1], BOUND)

    def run(keep: Keep) -> Tensor:
        return kda(*_seven(x), gate_lower_bound=BOUND, packing=packing, keep=keep)[0]

    def both(keep: Keep) -> Any:
        return torch.autograd.grad(run(keep), x, do)

    others: dict[str, Keep] = {"nothing kept": "nothing", "operands kept": "operands"} if fast else {}
    return Case(
        forward=lambda: run("scores"),
        both=lambda: both("scores"),
        trained={
            f"forward + backward, {name}": partial(partial, both, keep) for name, keep in others.items()
        },
        note="Hopper kernels, scores of chunks kept where not said otherwise, as in training"
        if fast
        else f"chunked torch: {reason}",
    )


def _fla(x: list[Tensor], borders: tuple[int, ...] | None, place: Place) -> Any:
    place.needs_gpu("fla-core's chunk_kda")
    cu = None if borders is None else torch.tensor(borders, device=place.device)
    return lambda: fla_kda(x, BOUND, cu), "safe gate"


def fla_kda(x: list[Tensor], bound: float, cu_seqlens: Tensor | None = None) -> Tensor:
    """fla-core's chunk_kda with everything inside that it can take: its output [b, t, h, d]."""
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    q, k, v, z, beta, a_log, bias = x
    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return chunk_kda(
        q=q, k=k, v=v, g=z, beta=beta, A_log=a_log, dt_bias=bias, lower_bound=bound, safe_gate=True,
        cu_seqlens=cu_seqlens, **flags,
    )[0]  # fmt: skip


def _automodel(x: list[Tensor], borders: tuple[int, ...] | None, place: Place) -> Any:
    place.needs_gpu("Automodel's fused KDA")
    from nemo_automodel.components.models.kimi_k3 import (  # pyright: ignore[reportMissingImports]
        kda_fused,
        model,
    )

    q, k, v, z, beta, a_log, bias = x
    d = q.shape[-1]
    if d != 128:
        raise Cannot(f"fused_chunk_kda is built for head dimension 128, not {d}")
    cu = None if borders is None else torch.tensor(borders, device=place.device, dtype=torch.int32)

    def run() -> Tensor:
        gate = model._fused_kda_gate(z, a_log, d, bias, BOUND).contiguous()
        return kda_fused.fused_chunk_kda(q, k, v, gate, beta.float().sigmoid().contiguous(), cu)[0]

    return run, "gate and sigmoid outside, as its model calls it"


def _seven(x: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, z, beta, a_log, bias = x
    return q, k, v, z, beta, a_log, bias
