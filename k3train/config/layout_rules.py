"""Whether a model fits degrees of parallelism; read by the cross-field rules and by the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from k3train.config.merge import even_split
from k3train.config.nearest import choices, divisors, multiples
from k3train.config.problems import ConfigProblem
from k3train.config.schema import Model, Parallel, Recompute, Stage

KeyOf = Callable[[str], str]
"""Full key of a field of Parallel: the stage's when the stage sets it, else the run's."""


def key_of_stage(name: str, stage: Stage) -> KeyOf:
    """Which key a degree of stage ``name`` comes from."""

    def key_of(field: str) -> str:
        own = getattr(stage.parallel, field) is not None
        return f"curriculum.stages.{name}.parallel.{field}" if own else f"parallel.{field}"

    return key_of


def layout_problems(model: Model, parallel: Parallel, world: int, key_of: KeyOf) -> Iterator[ConfigProblem]:
    """Every reason why this model cannot run with these degrees on ``world`` ranks.

    All degrees and sizes must be at least 1.
    """
    yield from _split_widths(model, parallel, key_of)
    yield from _world(parallel, world, key_of)
    yield from _experts(model, parallel, world, key_of)
    yield from _pipeline(model, parallel, key_of)


def offload_problems(stages: list[Parallel]) -> Iterator[ConfigProblem]:
    """Inputs of what is fully recomputed are wanted on the host, and no stage recomputes anything fully."""
    asked = [parallel for parallel in stages if parallel.recompute_offload]
    kinds = ("kda", "mla", "moe", "dense")
    policies = [getattr(each, f"recompute_{kind}") or each.recompute for each in asked for kind in kinds]
    if asked and Recompute.full not in policies:
        yield ConfigProblem(
            "parallel.recompute_offload",
            True,
            "keeps the inputs of what is fully recomputed on the host, and nothing is",
            "Set parallel.recompute=full, or parallel.recompute_offload=false",
            "parallel.recompute-offload",
            ("parallel.recompute",),
        )


def _split_widths(model: Model, parallel: Parallel, key_of: KeyOf) -> Iterator[ConfigProblem]:
    """Axes that tensor parallelism cuts."""
    moe = model.moe
    has_moe = model.num_dense_layers < model.num_layers or model.mtp.num_layers > 0
    cuts: list[tuple[str, str, int, str]] = [
        ("heads-tp", "model.num_heads", model.num_heads, "tp"),
        ("vocab-tp", "model.vocab_size", model.vocab_size, "tp"),
    ]
    if model.num_dense_layers > 0:
        cuts.append(("dense-ffn-tp", "model.dense_ffn_size", model.dense_ffn_size, "tp"))
    if has_moe:
        shared = moe.num_shared_experts * moe.shared_ffn_size
        cuts.append(("shared-ffn-tp", "model.moe.shared_ffn_size", shared, "tp"))
        cuts.append(("expert-ffn-etp", "model.moe.expert_ffn_size", moe.expert_ffn_size, "etp"))
    for name, size_key, size, degree_name in cuts:
        degree = getattr(parallel, degree_name)
        if size % degree:
            total = " (of all shared experts)" if name == "shared-ffn-tp" else ""
            yield ConfigProblem(
                key_of(degree_name),
                degree,
                f"must divide {size_key} = {size}{total}",
                f"Use {choices(divisors(size, degree))}",
                f"parallel.{name}",
                (size_key,),
            )


def _world(parallel: Parallel, world: int, key_of: KeyOf) -> Iterator[ConfigProblem]:
    product = parallel.tp * parallel.pp * parallel.cp
    if world % product:
        degrees = {name: getattr(parallel, name) for name in ("tp", "pp", "cp")}
        largest = max(degrees, key=lambda name: degrees[name])
        others = " and ".join(f"{key_of(name)} = {degrees[name]}" for name in degrees if name != largest)
        yield ConfigProblem(
            key_of(largest),
            degrees[largest],
            f"times {others} must divide the world of {world} ranks (cluster.nodes * cluster.ranks_per_node)",
            f"Lower a degree or start {choices(multiples(world, product))} ranks",
            "parallel.world",
            (*(key_of(name) for name in degrees), "cluster.nodes", "cluster.ranks_per_node"),
        )


def _experts(model: Model, parallel: Parallel, world: int, key_of: KeyOf) -> Iterator[ConfigProblem]:
    experts = model.moe.num_experts
    if experts % parallel.ep:
        yield ConfigProblem(
            key_of("ep"),
            parallel.ep,
            f"must divide model.moe.num_experts = {experts}",
            f"Use {choices(divisors(experts, parallel.ep))}",
            "parallel.experts-ep",
            ("model.moe.num_experts",),
        )
    if world % (parallel.tp * parallel.pp * parallel.cp):
        return  # already reported; the fold below would only repeat it
    ranks = world // parallel.pp
    if ranks % (parallel.ep * parallel.etp):
        fitting = [d for d in divisors(ranks // parallel.etp or 1, parallel.ep, count=8) if experts % d == 0]
        yield ConfigProblem(
            key_of("ep"),
            parallel.ep,
            f"times etp = {parallel.etp} must divide tp*cp*dp = {ranks}, the ranks of one pipeline rank",
            f"Use {choices(fitting[:2] or [1])} for ep or another {key_of('etp')}",
            "parallel.ep-fold",
            (
                key_of("etp"),
                key_of("tp"),
                key_of("pp"),
                key_of("cp"),
                "model.moe.num_experts",
                "cluster.ranks_per_node",
                "cluster.nodes",
            ),
        )


def _pipeline(model: Model, parallel: Parallel, key_of: KeyOf) -> Iterator[ConfigProblem]:
    chunks = parallel.pp * parallel.vp
    layers = model.num_layers
    read = ("model.num_layers", key_of("pp"), key_of("vp"))
    if parallel.vp > 1 and parallel.pp == 1:
        yield ConfigProblem(
            key_of("vp"),
            parallel.vp,
            "needs pp > 1",
            f"Set {key_of('vp')}=1 or raise {key_of('pp')}",
            "parallel.vp-needs-pp",
            (key_of("pp"),),
        )
    if chunks > layers:
        yield ConfigProblem(
            key_of("pp"),
            parallel.pp,
            f"times vp = {parallel.vp} makes {chunks} chunks, more than model.num_layers = {layers}",
            f"Use at most {max(1, layers // parallel.vp)}",
            "parallel.layers-pp",
            read[:1] + read[2:],
        )
        return
    split = parallel.pipeline_split
    if split is None:
        return
    even = list(even_split(layers, chunks))
    key = key_of("pipeline_split")
    fix = f"The even split is {even}"
    if len(split) != chunks:
        rule = f"must have pp*vp = {chunks} numbers but has {len(split)}"
        yield ConfigProblem(key, split, rule, fix, "parallel.split-length", read[1:])
    elif sum(split) != layers:
        rule = f"must add up to model.num_layers = {layers} but adds up to {sum(split)}"
        yield ConfigProblem(key, split, rule, fix, "parallel.split-sum", read)
