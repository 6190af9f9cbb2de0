"""Who does what: the arithmetic between a rank and its place in every kind of parallelism. No torch.

Ranks are numbered in megatron-core's order "tp-cp-ep-dp-pp", tp fastest. Dense layers see tp x cp x dp x pp;
expert layers see the same ranks as etp x ep x expert_dp x pp.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.layout_rules import layout_problems
from k3train.config.merge import even_split
from k3train.config.problems import ConfigError, ConfigProblem
from k3train.config.schema import Model, Parallel

RANK_ORDER = "tp-cp-ep-dp-pp"
"""Order of the parallel axes over ranks, fastest first, as megatron-core spells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism of one stage on one world."""

    world: int
    """Ranks: tp * cp * dp * pp."""
    tp: int
    pp: int
    vp: int
    """Chunks per pipeline rank."""
    cp: int
    ep: int
    etp: int
    dp: int
    """Data parallel: ranks that see other sequences."""
    pipeline_split: tuple[int, ...]
    """Decoder layers of each of the pp*vp chunks, in pipeline order."""

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts: world / (etp * ep * pp)."""
        return self.world // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Place of one rank: its rank within each kind of group."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    expert_dp: int


def make_layout(model: Model, parallel: Parallel, world_size: int) -> Layout:
    """Lay a model out over ``world_size`` ranks.

    Raises ConfigError with the nearest valid values when the model or the world does not fit the degrees.
    """
    problems = list(_degree_problems(parallel, world_size))
    problems = problems or list(layout_problems(model, parallel, world_size, lambda name: f"parallel.{name}"))
    if problems:
        raise ConfigError(problems)
    split = parallel.pipeline_split or even_split(model.num_layers, parallel.pp * parallel.vp)
    return Layout(
        world=world_size,
        tp=parallel.tp,
        pp=parallel.pp,
        vp=parallel.vp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        dp=world_size // (parallel.tp * parallel.pp * parallel.cp),
        pipeline_split=tuple(split),
    )


def chunk_layers(layout: Layout, pp_rank: int, chunk: int) -> range:
    """Decoder layers (from 0, over the whole model) of chunk ``chunk`` on pipeline rank ``pp_rank``.

    Chunk c of pipeline rank p is at position c*pp + p in pipeline order.
    """
    assert 0 <= pp_rank < layout.pp, f"pipeline rank {pp_rank} of {layout.pp}"
    assert 0 <= chunk < layout.vp, f"chunk {chunk} of {layout.vp}"
    position = chunk * layout.pp + pp_rank
    start = sum(layout.pipeline_split[:position])
    return range(start, start + layout.pipeline_split[position])


def rank_coordinates(layout: Layout, rank: int) -> Coordinates:
    """Where ``rank`` stands in every group."""
    assert 0 <= rank < layout.world, f"rank {rank} of {layout.world}"
    dense, tp = divmod(rank, layout.tp)
    dense, cp = divmod(dense, layout.cp)
    pp, dp = divmod(dense, layout.dp)
    expert, etp = divmod(rank, layout.etp)
    expert, ep = divmod(expert, layout.ep)
    return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, expert_dp=expert % layout.expert_dp)


def _degree_problems(parallel: Parallel, world_size: int) -> list[ConfigProblem]:
    """Degrees that are no positive numbers; the other rules divide by them."""
    degrees = {f"parallel.{name}": getattr(parallel, name) for name in ("tp", "pp", "vp", "cp", "ep", "etp")}
    degrees["cluster.ranks_per_node"] = world_size
    for position, layers in enumerate(parallel.pipeline_split or ()):
        degrees[f"parallel.pipeline_split.{position}"] = layers
    return [
        ConfigProblem(key, value, "must be at least 1", "Use 1 or more", "range")
        for key, value in degrees.items()
        if value < 1
    ]
