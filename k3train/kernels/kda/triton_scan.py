"""States that enter the segments of long documents, from the segments' own maps.

Imports triton: import it inside functions only.
"""

import triton
import triton.language as tl


@triton.jit
def kda_scan(
    chains,
    steps,
    start,
    written,
    transition,
    states,
    end,
    H: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_START: tl.constexpr,
):
    """Apply maps S -> written + transition S in order; a program does some value channels of one head.

    All states are fp32 [slot, H, D, D]. ``chains`` and ``steps`` are those of ``segments.Scan``. Gradients
    take the transposed transitions.
    """
    i_v = tl.program_id(0)
    i_h = tl.program_id(1)
    chain = chains + 4 * tl.program_id(2)
    first = tl.load(chain)
    count = tl.load(chain + 1)
    i_start = tl.load(chain + 2)
    i_end = tl.load(chain + 3)
    d = tl.arange(0, D)
    v = i_v * BV + tl.arange(0, BV)
    place = i_h * (D * D) + d[:, None] * D + v[None, :]
    if TRANSPOSED:
        matrix = i_h * (D * D) + d[None, :] * D + d[:, None]
    else:
        matrix = i_h * (D * D) + d[:, None] * D + d[None, :]
    here = (d >= 0)[:, None]
    S = tl.where((d[:, None] == v[None, :]) & (i_start == -2), 1.0, 0.0)
    if HAS_START:
        S += tl.load(
            start + i_start.to(tl.int64) * (H * D * D) + place, mask=here & (i_start >= 0), other=0.0
        )
    i = first
    while i < first + count:
        step = steps + 3 * i
        i_state = tl.load(step)
        i_written = tl.load(step + 1)
        i_transition = tl.load(step + 2)
        tl.store(states + i_state.to(tl.int64) * (H * D * D) + place, S, mask=here & (i_state >= 0))
        M = tl.load(
            transition + i_transition.to(tl.int64) * (H * D * D) + matrix,
            mask=here & (i_transition >= 0),
            other=0.0,
        )
        W = tl.load(
            written + i_written.to(tl.int64) * (H * D * D) + place, mask=here & (i_written >= 0), other=0.0
        )
        S = tl.dot(M, S, W, input_precision="tf32x3")
        i += 1
    tl.store(end + i_end.to(tl.int64) * (H * D * D) + place, S, mask=here & (i_end >= 0))
