"""KDA on Hopper: forward in three kernels, backward in six, nothing saved but the inputs and the output.

Forward: ``kda_prep`` and ``kda_inverse`` turn every chunk of 64 tokens into the operands of the chain (768
bytes of q, k and z per token and head in, 1040 out), ``kda_chain`` runs the documents. Backward computes
the same operands again, chains through the states once more (storing them, without the output), then the
chain of state gradients, the pairs within chunks and the gradients. q, k, v, z and their gradients are
bf16; states are fp32.
"""

from __future__ import annotations

import importlib.util
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3train.kernels.packing import Packing

CHUNK = 64
HEAD_DIM = 128
STRONGEST_BOUND = -5.0
"""Below it e^(31/2 |bound|), the largest factor within a block of 32 tokens, leaves the range of bf16."""
OLDEST_PTXAS = (13, 1)
"""Older assemblers reuse the operand registers of a running wgmma: wrong results and invalid addresses."""


def is_available(
    where: torch.device | str, dtype: torch.dtype, head_dim: int, gate_lower_bound: float
) -> tuple[bool, str]:
    """Whether ``triton_kda`` can serve such tensors, and the reason when it cannot."""
    device = torch.device(where)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False, f"it needs a CUDA device, the tensors are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(device)
        return False, f"it is written for compute capability 9.0 (H100, H200), {name} has {capability}"
    if dtype != torch.bfloat16:
        return False, f"it reads bfloat16, the tensors are {dtype}"
    if head_dim != HEAD_DIM:
        return False, f"it needs head dimension {HEAD_DIM}, the model has {head_dim}"
    if not STRONGEST_BOUND <= gate_lower_bound < 0:
        return (
            False,
            f"it holds for gate lower bounds in [{STRONGEST_BOUND}, 0), the model has {gate_lower_bound}",
        )
    return _assembler()


@lru_cache(maxsize=1)
def _assembler() -> tuple[bool, str]:
    """Whether ptxas compiles Hopper's matrix instructions correctly; takes the PyPI wheel's if it is
    there."""
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    if "TRITON_PTXAS_PATH" not in os.environ and (found := _wheel_ptxas()):
        os.environ["TRITON_PTXAS_PATH"] = str(found)
    from triton import knobs

    ptxas = knobs.nvidia.ptxas
    version = tuple(int(n) for n in re.findall(r"\d+", ptxas.version)[:2])
    if version < OLDEST_PTXAS:
        need = ".".join(map(str, OLDEST_PTXAS))
        return False, (
            f"ptxas {ptxas.version} ({ptxas.path}) miscompiles Hopper's asynchronous matrix instructions; "
            f"install the PyPI package nvidia-cuda-nvcc>={need} or set TRITON_PTXAS_PATH to a newer one"
        )
    return True, ""


def _wheel_ptxas() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for path in sorted(Path(root).glob("cu*/bin/ptxas"), reverse=True):
            if os.access(path, os.X_OK):
                return path
    return None


def triton_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    gate_lower_bound: float,
    packing: Packing | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the gated delta rule (k3 report eq. 1-6) and return (o, final states or None).

    q, k, v, z bf16 [b, t, h, 128]: after convolution and SiLU; q and k are not yet normalised, z is the
    decay's pre-activation without its bias. beta [b, t, h] are logits. A_log [h] and dt_bias [h * 128] are
    read in fp32. With ``packing`` b is 1 and documents do not see each other; without it every row is one
    document. States are fp32 [documents or b, h, 128, 128], key channel before value channel. Every
    gradient is deterministic.
    """
    b, t, h, d = q.shape
    borders = packing.local_cu_seqlens if packing is not None else tuple(range(0, b * t + 1, t))
    table = _table(borders, q.device)
    rows = [x.reshape(b * t, *x.shape[2:]).contiguous() for x in (q, k, v, z, beta)]
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    o, final = _Kda.apply(
        *rows, A_log.float(), dt_bias.float(), initial_state, gate_lower_bound, table, output_final_state
    )
    return o.view(b, t, h, d), final if output_final_state else None


class _Table:
    """Chunks and documents of one buffer, on the device."""

    def __init__(self, borders: tuple[int, ...], device: torch.device) -> None:
        chunks, documents = [], []
        for i in range(len(borders) - 1):
            start, length = borders[i], borders[i + 1] - borders[i]
            documents.append((start, length, len(chunks), i))
            chunks += [(start + c, length - c) for c in range(0, length, CHUNK)]
        # long documents first: the chain of the longest one decides when the last program ends
        documents.sort(key=lambda x: -x[1])
        self.num_chunks, self.num_documents = len(chunks), len(documents)
        self.chunks = _upload(chunks, device)
        """int32 [chunks, 2]: first token, tokens from there to the document's end."""
        self.documents = _upload(documents, device)
        """int32 [documents, 4]: first token, length, first chunk, number of the document."""


def _upload(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    host = torch.tensor(rows, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@lru_cache(maxsize=16)
def _table(borders: tuple[int, ...], device: torch.device) -> _Table:
    """One table a buffer: all layers of a step, and all steps with the same borders, share it."""
    return _Table(borders, device)


class _Shapes:
    """Launch settings of one call."""

    def __init__(self, h: int, table: _Table) -> None:
        # a program per head and document keeps the whole state when that fills half of the device;
        # otherwise the value channels are split over programs: operands are then read more than once, out
        # of the L2 cache
        heads = h * table.num_documents
        self.block_v = 128 if heads > 66 else 64 if heads > 33 else 32
        self.warps, self.stages = 8 if self.block_v == 128 else 4, 2


@lru_cache
def _layout(columns: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)


def _descriptor(x: Tensor, rows: int, columns: int) -> Any:
    """A matrix whose last axis is x's, copied in blocks of rows x columns by the bulk copy engine."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width = x.shape[-1]
    shape, block = [x.numel() // width, width], [rows, columns]
    return TensorDescriptor(x, shape, [width, 1], block, _layout(columns))


def _operands(
    q: Tensor, k: Tensor, z: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float, table: _Table
):
    """Run ``kda_prep`` and ``kda_inverse``: [chunks, h, 64, .] tiles by name."""
    from k3train.kernels.kda.triton_prep import kda_inverse, kda_prep

    # autograd's threads begin without a CUDA context; tensor maps need one, and an ordinary launch sets it
    q.new_zeros(1)
    n, h, d = table.num_chunks, q.shape[1], q.shape[2]
    tiles = {name: q.new_empty(n, h, CHUNK, d) for name in ("kh", "kt", "qh")}
    tiles.update({name: q.new_empty(n, h, CHUNK, CHUNK) for name in ("tb", "aqk")})
    tiles["dec"] = q.new_empty(n, h, d, dtype=torch.float32)
    tiles["rs"] = q.new_empty(n, h, 2 * CHUNK, dtype=torch.float32)
    akk = tiles["tb"].view(torch.float16)
    rows = [_descriptor(x.view(-1, h * d), CHUNK, d) for x in (q, k, z)]
    out = [_descriptor(tiles[name], CHUNK, d) for name in ("kh", "kt", "qh")]
    _launch(
        kda_prep, (n * h,), *rows, A_log, dt_bias, *out, akk, tiles["aqk"], tiles["dec"], tiles["rs"],
        table.chunks, d**-0.5, bound, _shift(bound), H=h, D=d, num_warps=8, maxnreg=128,
    )  # fmt: skip
    squares = [_descriptor(x, CHUNK, CHUNK) for x in (akk, tiles["tb"])]
    _launch(kda_inverse, (n * h,), *squares, beta, table.chunks, H=h, num_warps=4)
    return tiles


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    kernel[grid](*arguments, **settings)


def _shift(bound: float) -> float:
    """Half of the largest log2 decay over a block of 32 tokens."""
    return (CHUNK // 2 - 1) * abs(bound) / 2 * 1.4426950408889634


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, z, beta, A_log, dt_bias, initial, bound, table, want_final):
        from k3train.kernels.kda.triton_chain import kda_chain

        h, d = q.shape[1:]
        x = _operands(q, k, z, beta, A_log, dt_bias, bound, table)
        s = _Shapes(h, table)
        o = torch.empty_like(v)
        final = q.new_empty(table.num_documents, h, d, d, dtype=torch.float32) if want_final else None
        _launch(
        kda_chain, (d // s.block_v, h, table.num_documents),
            _descriptor(v.view(-1, h * d), CHUNK, s.block_v), *_chain_operands(x), None, None, x["dec"], o,
            initial, final, table.documents, H=h, D=d, V=d, BV=s.block_v, HAS_H0=initial is not None,
            STORE_HT=want_final, OUTPUT=True, STAGES=s.stages, W=s.warps, num_warps=s.warps,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, z, beta, A_log, dt_bias, initial, o)
        ctx.bound, ctx.table = bound, table
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do, dfinal):
        q, k, v, z, beta, A_log, dt_bias, initial, o = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        grads = _backward(q, k, v, z, beta, A_log, dt_bias, initial, o, do, dfinal, ctx.bound, ctx.table)
        return (*grads, None, None, None)


def _chain_operands(x: dict[str, Tensor]) -> list[Any]:
    wide = [_descriptor(x[name], CHUNK, HEAD_DIM) for name in ("kh", "kt", "qh")]
    return [*wide, *(_descriptor(x[name], CHUNK, CHUNK) for name in ("tb", "aqk"))]


def _backward(q, k, v, z, beta, A_log, dt_bias, initial, o, do, dfinal, bound, table):
    from k3train.kernels.kda.triton_chain import kda_bchain, kda_chain

    h, d = q.shape[1:]
    n, s = table.num_chunks, _Shapes(q.shape[1], table)
    grid = (d // s.block_v, h, table.num_documents)
    x = _operands(q, k, z, beta, A_log, dt_bias, bound, table)
    shapes = {"H": h, "D": d, "V": d, "BV": s.block_v, "STAGES": s.stages, "W": s.warps, "num_warps": s.warps}
    operands = _chain_operands(x)
    hs, dhs = q.new_empty(n, h, d, d), q.new_empty(n, h, d, d)
    us, dv = q.new_empty(n, h, CHUNK, d), torch.empty_like(v)
    _launch(
        kda_chain, grid,
        _descriptor(v.view(-1, h * d), CHUNK, s.block_v), *operands, _descriptor(hs, d, s.block_v),
        _descriptor(us, CHUNK, s.block_v), x["dec"], None, initial, None, table.documents,
        HAS_H0=initial is not None, STORE_HT=False, OUTPUT=False, **shapes,
    )  # fmt: skip
    dinitial = torch.empty_like(initial) if initial is not None else None
    _launch(
        kda_bchain, grid,
        _descriptor(do.view(-1, h * d), CHUNK, s.block_v), *operands, _descriptor(dhs, d, s.block_v),
        x["dec"], dv, dfinal, dinitial, table.documents, HAS_DHT=dfinal is not None, STORE_DH0=dinitial is
        not None, **shapes,
    )  # fmt: skip
    rs = x["rs"]
    del x, operands
    dq, dk, dz, dbeta, dA, dbias = _input_gradients(
        q, k, v, z, beta, A_log, dt_bias, o, do, us, dv, hs, dhs, rs, bound, table
    )
    return dq, dk, dv, dz, dbeta, dA, dbias, dinitial


def _input_gradients(q, k, v, z, beta, A_log, dt_bias, o, do, us, dv, hs, dhs, rs, bound, table):
    from k3train.kernels.kda.triton_grad import kda_grad, kda_pairs

    n, (h, d) = table.num_chunks, q.shape[1:]
    dq, dk, dz, dbeta = (torch.empty_like(x) for x in (q, k, z, beta))
    pairs = q.new_empty(n, h, 2, CHUNK, CHUNK)
    sums = q.new_empty(n, h, 4 * CHUNK, dtype=torch.float32)
    dA = q.new_empty(n, h, 2, dtype=torch.float32)
    dbias = q.new_empty(n, h, d, dtype=torch.float32)
    rows = [_descriptor(x.view(-1, h * d), CHUNK, d) for x in (do, dv, o, v)]
    wide = [_descriptor(x, CHUNK, d) for x in (us, hs, dhs)]
    _launch(
        kda_pairs, (n * h,), *rows[:2], wide[0], *rows[2:], _descriptor(pairs, CHUNK, CHUNK), beta, dbeta,
        sums, table.chunks, H=h, V=d, num_warps=4,
    )  # fmt: skip
    _launch(
        kda_grad, (2 * n * h,), q, k, z, A_log, dt_bias, rows[0], wide[0], rows[1], *wide[1:], rs,
        _descriptor(pairs, 32, 32), sums, dq, dk, dz, dA, dbias, table.chunks,
        d**-0.5, bound, _shift(bound), H=h, D=d, V=d, num_warps=4,
    )  # fmt: skip
    return dq, dk, dz, dbeta, dA.sum((0, 2)), dbias.sum(0).view(-1)
