"""Time the router on one GPU: the fused kernel, separate kernels and megatron-core's quantile mode at once.

    python tests/gpu/run_router.py [--tokens 8192] [--experts 896] [--top-k 16] [--bins 1000] [--hidden 7168]

Checks the fused kernel against plain torch first. Takes under a minute; the table comes last. Times are
medians of single calls between device events, with the L2 cache overwritten in between. ``logits`` is the
product with the router's weight; a variant's own time starts there and ends with experts, cutoff, loads and
what the step's balance needs. The update is what a step adds once, for all layers. megatron-core's mode takes
only batches in which every expert's share is whole: it gets fewer tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from megatron.core.transformer.moe.moe_utils import (  # noqa: E402
    qb_dual_update,
    router_gating_linear,
    topk_routing_with_score_function,
)

from k3train.config import schema  # noqa: E402
from k3train.router import triton_select  # noqa: E402
from k3train.router.logits import router_logits  # noqa: E402
from k3train.router.quantile import QuantileBalance  # noqa: E402
from k3train.router.select import Tally, count_margins, select_reference  # noqa: E402


def median(function, repeats: int = 30) -> float:
    """Milliseconds."""
    cold = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        function()
    pairs = []
    for _ in range(repeats):
        cold.zero_()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        function()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[repeats // 2]


def check(logits: torch.Tensor, bias: torch.Tensor, top_k: int, bins: int) -> None:
    """The fused kernel chooses and counts as plain torch does, twice the same."""
    tallies = [tally_of(bias, bins) for _ in range(3)]
    fused = [triton_select.select(logits, bias, top_k, tally) for tally in tallies[:2]]
    plain = select_reference(logits, bias, top_k, tallies[2])
    same = (fused[0][0] == plain.experts).float().mean().item()
    moved = (tallies[0].histogram - tallies[2].histogram).abs().sum().item() / logits.numel()
    repeats = torch.equal(fused[0][0], fused[1][0]) and torch.equal(
        tallies[0].histogram, tallies[1].histogram
    )
    print(f"choices equal to plain torch's {same:.6f}, margins in another bin {moved:.1e}, repeats {repeats}")
    assert same > 0.9999
    assert moved < 1e-3
    assert repeats


def tally_of(bias: torch.Tensor, bins: int) -> Tally:
    """Empty counts."""
    experts = len(bias)
    return Tally(
        torch.zeros(experts, dtype=torch.int64, device="cuda"),
        torch.zeros(experts, bins, dtype=torch.int32, device="cuda"),
        torch.stack((bias.min() - 1, bias.max() + 1)),
        None,
    )


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("tokens", 8192),
        ("experts", 896),
        ("top-k", 16),
        ("bins", 1000),
        ("hidden", 7168),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(o.tokens, o.hidden, device="cuda").bfloat16()
    weight = torch.randn(o.experts, o.hidden, device="cuda") / o.hidden**0.5
    bias = torch.randn(o.experts, device="cuda") * 0.1
    logits = router_gating_linear(x, weight, None, torch.float32)
    check(logits, bias, o.top_k, o.bins)
    tally, scores = tally_of(bias, o.bins), torch.sigmoid(logits)
    assert tally.histogram is not None
    best = (scores + bias).topk(o.top_k + 1, dim=-1)
    experts, cutoff = best.indices[:, : o.top_k].contiguous(), best.values[:, -1].contiguous()
    one = torch.ones_like(experts).view(-1)
    rule = QuantileBalance(o.experts, o.top_k, schema.Quantile(bins=o.bins)).cuda()
    rule.histogram.copy_(tally.histogram)

    whole = o.experts // math.gcd(o.experts, o.top_k)
    fewer = logits[: o.tokens - o.tokens % whole]

    def megatron(update: bool) -> None:
        chosen, _ = qb_dual_update(fewer, o.top_k, bias, update_beta=update)
        topk_routing_with_score_function(fewer, o.top_k, score_function="sigmoid", precomputed_indices=chosen)

    def fused(counts: Tally | None) -> None:
        triton_select.select(logits, bias, o.top_k, counts)

    layers = 24
    stacked = [x[None].expand(layers, *x.shape) for x in (bias, tally.bounds, tally.loads, tally.histogram)]

    def update() -> None:
        rule.next_biases([rule] * layers, *stacked[:3], stacked[3].long())

    grad = torch.zeros_like(logits).scatter_(1, experts, torch.randn(o.tokens, o.top_k, device="cuda"))
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()

    def linear(function: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*leaves), leaves, grad)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return router_gating_linear(x, weight, None, torch.float32)

    rows = [
        ("logits, three bf16 products", lambda: router_logits(x, weight)),
        ("logits, one fp32 product (megatron-core)", lambda: plain(x, weight)),
        ("logits forward + backward, bf16 products", linear(router_logits)),
        ("logits forward + backward, fp32 (megatron-core)", linear(plain)),
        ("fused: score, top-k, cutoff, loads, histogram", lambda: fused(tally)),
        ("fused without counting", lambda: fused(None)),
        ("separate kernels, all of it", lambda: select_reference(logits, bias, o.top_k, tally)),
        ("  sigmoid", lambda: torch.sigmoid(logits)),
        ("  top-(k+1)", lambda: (scores + bias).topk(o.top_k + 1, dim=-1)),
        ("  loads", lambda: tally.loads.scatter_add_(0, experts.view(-1), one)),
        ("  histogram", lambda: count_margins(scores, cutoff, None, tally.bounds, tally.histogram)),
        (f"update, once a step, all {layers} layers", update),
        (f"megatron-core's quantile mode, {len(fewer)} tokens", lambda: megatron(True)),
        ("  without counting", lambda: megatron(False)),
    ]  # fmt: skip
    times = [(name, median(function)) for name, function in rows]
    floor = 1e3 * (logits.numel() * 4 + tally.histogram.numel() * 4) / 4.8e12
    properties = torch.cuda.get_device_properties(0)
    print(
        f"\n{properties.name}, torch {torch.__version__}, "
        f"{o.tokens} tokens, {o.experts} experts, top-{o.top_k}"
    )
    print(f"{o.bins} bins; reading the logits once and the histogram takes {floor:.3f} ms at 4.8 TB/s")
    for name, milliseconds in times:
        print(f"{name:50} {milliseconds:8.3f} ms")


if __name__ == "__main__":
    main()
