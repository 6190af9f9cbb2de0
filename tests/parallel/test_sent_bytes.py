"""Bytes that layers send, counted at the collectives, against the table in docs/parallelism.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from k3train.config import schema
from k3train.kernels.packing import make_packing
from k3train.model.config import make_config
from k3train.model.kda import KdaAttention
from k3train.model.mla import GatedMla
from k3train.model.mlp import SituMlp
from k3train.model.moe import LatentMoe
from k3train.parallel.groups import start_groups
from k3train.parallel.layout import make_layout
from tests.parity.test_model import MODEL
from tests.ranks import run_ranks

TOKENS = 48
D, HEADS, MLA, MOE, WIDTH = MODEL.hidden_size, MODEL.num_heads, MODEL.mla, MODEL.moe, MODEL.kda.head_dim
KEY, NARROW = MLA.qk_head_dim + MLA.qk_shared_head_dim, MLA.kv_lora_rank + MLA.qk_shared_head_dim


class Sent(TorchDispatchMode):
    """Counts the elements that this rank sends to others, by collective."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name == "_allgather_base_":
            out, mine = args[:2]
            self.elements["all-gather"] += out.numel() - mine.numel()
        elif name == "_reduce_scatter_base_":
            out, whole = args[:2]
            self.elements["reduce-scatter"] += whole.numel() - out.numel()
        elif name == "alltoall_base_":
            self.elements["all-to-all"] += _to_others(args[1], args[4])
        elif name == "send":
            self.elements["send"] += sum(x.numel() for x in args[0])
        return func(*args, **(kwargs or {}))


def _to_others(sent: Tensor, splits: list[int]) -> int:
    """Elements of an all-to-all over all ranks, less this rank's own part."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return sent[0].numel() * (sum(splits) - splits[rank]) if splits else sent.numel() * (ranks - 1) // ranks


def _layer(kind: str, config: Any, groups: Any) -> Any:
    match kind:
        case "kda":
            return KdaAttention(config, 1, groups.pg)
        case "mla":
            return GatedMla(config, 1, groups.pg)
        case "dense":
            return SituMlp(config, MODEL.dense_ffn_size, groups.pg)
        case _:
            return LatentMoe(config, 1, groups.pg)


def _forward(rank: int, kind: str, degrees: dict[str, int]) -> dict[str, int]:
    parallel = schema.Parallel(**degrees)
    world = torch.distributed.get_world_size()
    layout = make_layout(MODEL, parallel, world)
    groups = start_groups(layout, seed=1)
    layer = _layer(kind, make_config(MODEL, parallel, layout), groups)
    packing = make_packing(
        (0, 5, TOKENS), torch.ones(TOKENS, dtype=torch.bool), rank=groups.cp_rank, size=layout.cp
    )
    x = torch.randn(TOKENS // (layout.cp * layout.tp), 1, D)
    with Sent() as sent:
        layer(x, packed_seq_params=packing)
    return dict(sent.elements)


def _per_token(kind: str, **degrees: int) -> list[dict[str, float]]:
    """Elements that each rank sends for one token of its own share in a forward pass."""
    tp, cp = degrees.get("tp", 1), degrees.get("cp", 1)
    ranks = run_ranks(max(tp * cp, degrees.get("ep", 1)), _forward, kind, degrees)
    return [{name: count * tp * cp / TOKENS for name, count in sent.items()} for sent in ranks]


def test_tensor_parallel_layers() -> None:
    both = {"all-gather": D, "reduce-scatter": D}  # times tp - 1
    assert _per_token("kda", tp=2) == [both] * 2
    assert _per_token("dense", tp=2) == [both] * 2
    assert _per_token("mla", tp=2) == [{"all-gather": MLA.q_lora_rank + NARROW + D, "reduce-scatter": D}] * 2


@pytest.mark.parametrize("cp", [2, 4])
def test_mla_under_context_parallel_with_heads_for_all(cp: int) -> None:
    moved = HEADS * (KEY + MLA.v_head_dim) * (cp - 1) / cp
    assert _per_token("mla", cp=cp) == [{"all-to-all": moved, "all-gather": NARROW * (cp - 1)}] * cp


def test_mla_under_context_parallel_with_shares_of_the_queries() -> None:
    """A query goes to as many ranks as heads have parts, here to all heads' one rank: at most all of it."""
    ranks = _per_token("mla", cp=3)
    most = HEADS * (KEY + MLA.v_head_dim)
    assert all(sent["all-gather"] == NARROW * 2 for sent in ranks)
    assert all(0 < sent["all-to-all"] <= most for sent in ranks)
    total = sum(sent["all-to-all"] for sent in ranks) / 3
    assert total == pytest.approx(most * 2 / 3, rel=0.25), "as if each query's place were drawn"


@pytest.mark.parametrize("cp", [2, 4])
def test_kda_under_context_parallel_sends_the_same_whatever_cp(cp: int) -> None:
    maps = HEADS * WIDTH * (2 * WIDTH + WIDTH)  # state and transition out, the entering state back
    halo = 3 * 3 * HEADS * WIDTH
    for rank, sent in enumerate(run_ranks(cp, _forward, "kda", {"cp": cp})):
        assert sent["all-to-all"] == maps * (cp - 1) // cp
        assert sent.get("send", 0) == (halo if rank < cp - 1 else 0)


def test_experts_send_at_most_every_choice_in_the_latent_width() -> None:
    for sent in run_ranks(2, _forward, "moe", {"ep": 2}):
        share = TOKENS  # ep ranks are data-parallel ranks here: each has all of its own tokens
        routed = (MOE.latent_size + MOE.latent_size + 1) * MOE.top_k * share  # there, back, its weight
        counts = MOE.num_experts
        assert 0 < sent["all-to-all"] <= routed
        assert sent["all-gather"] <= counts
