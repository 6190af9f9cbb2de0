"""Cross-field rules: small functions, each problem with a stable id, all reported at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import cast

from k3train.config.build import to_plain
from k3train.config.context_rules import context_problems
from k3train.config.fp8_rules import fp8_problems
from k3train.config.keys import closest_word, follow, suggest_key
from k3train.config.layout_rules import key_of_stage, layout_problems, offload_problems
from k3train.config.merge import stage_parallel, world_size
from k3train.config.nearest import choices, multiples
from k3train.config.problems import ConfigProblem
from k3train.config.ranges import range_problems
from k3train.config.schema import Offload, OnSpike, Optimizer, Parallel, Run, Schedule, Stage
from k3train.config.secrets import HIDDEN, redact, variable_in

Problems = Iterator[ConfigProblem]

_NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*")
"""Of a run: folders, also in scripts and on a cluster's queue, so nothing that a shell acts on."""
_NAME_FIX = "Use letters, digits, '-', '_', '.', '+' and single slashes; dir may be any folder"


def check(run: Run, *, wrong_keys: frozenset[str] = frozenset()) -> list[ConfigProblem]:
    """Every rule that the run breaks, in the order of the rules and each once.

    Problems that involve one of ``wrong_keys`` are left out: those values are not the user's.
    """
    sane = deepcopy(run)
    outside = list(range_problems(sane, repair=True))
    wrong = wrong_keys | {problem.key for problem in outside}
    problems = [problem for problem in outside if not concerns(problem, wrong_keys)]
    for rule in RULES:
        problems += [problem for problem in rule(sane) if not concerns(problem, wrong)]
    unique = {(problem.id, problem.key, repr(problem.value)): problem for problem in reversed(problems)}
    return list(reversed(unique.values()))


def concerns(problem: ConfigProblem, keys: frozenset[str] | set[str]) -> bool:
    """Whether the problem is about one of these keys, or about something below or above one."""
    read = (problem.key, *problem.also)
    return any(a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.") for a in read if a for b in keys)


def _overrides(run: Run) -> Problems:
    for key in run.resume.override:
        if follow(key) is None:
            meant = suggest_key(key)
            fix = f"Did you mean {meant}?" if meant else "Name settings as they are typed, such as seed"
            yield ConfigProblem("resume.override", key, "names no setting", fix, "resume.override")


def _names(run: Run) -> Problems:
    if run.name.startswith("/") or ".." in run.name.split("/"):
        yield ConfigProblem("name", run.name, "would lead out of the folder of runs", _NAME_FIX, "run.name")
    elif not _NAME.fullmatch(run.name) or "." in run.name.split("/"):
        rule = "has a sign that a name cannot have"
        yield ConfigProblem("name", run.name, rule, _NAME_FIX, "run.name")


def _secrets(run: Run) -> Problems:
    for key, text in _texts(to_plain(run), ""):
        variable = variable_in(text)
        if variable or redact(text) != text:
            what = f"the value of the environment variable {variable}" if variable else "a password or key"
            rule = f"holds {what}, and settings are printed and kept on the disk"
            fix = "Take it out; programs find it in the environment"
            yield ConfigProblem(redact(key), HIDDEN, rule, fix, "config.secret")


def _texts(node: object, path: str) -> Iterator[tuple[str, str]]:
    """Every text in the settings, names that the user chose included, with its key."""
    if isinstance(node, Mapping):
        for name, entry in cast("Mapping[str, object]", node).items():
            key = f"{path}.{name}" if path else name
            yield key, name
            yield from _texts(entry, key)
    elif isinstance(node, list):
        for entry in cast("list[object]", node):
            yield from _texts(entry, path)
    elif isinstance(node, str):
        yield path, node


def _mla_layers(run: Run) -> Problems:
    layers = run.model.mla_layers or []
    count = run.model.num_layers
    outside = [layer for layer in layers if layer >= count]
    repeated = sorted({layer for layer in layers if layers.count(layer) > 1})
    if outside or repeated:
        what = f"holds {choices(outside)}" if outside else f"repeats {choices(repeated)}"
        rule = f"{what}, but lists each MLA layer once and counts layers from 0 to {count - 1}"
        fix = f"Use {sorted({layer for layer in layers if layer < count})}"
        yield ConfigProblem("model.mla_layers", layers, rule, fix, "model.mla-layers", ("model.num_layers",))


def _dense_layers(run: Run) -> Problems:
    model = run.model
    if model.num_dense_layers > model.num_layers:
        rule = f"must not be more than model.num_layers = {model.num_layers}"
        fix = f"Use at most {model.num_layers}"
        yield ConfigProblem(
            "model.num_dense_layers",
            model.num_dense_layers,
            rule,
            fix,
            "model.dense-layers",
            ("model.num_layers",),
        )


def _top_k(run: Run) -> Problems:
    moe = run.model.moe
    if moe.top_k >= moe.num_experts:
        rule = f"must be less than model.moe.num_experts = {moe.num_experts}"
        fix = f"Use at most {moe.num_experts - 1}" if moe.num_experts > 1 else "Raise model.moe.num_experts"
        yield ConfigProblem(
            "model.moe.top_k", moe.top_k, rule, fix, "model.top-k", ("model.moe.num_experts",)
        )


def _latent(run: Run) -> Problems:
    model = run.model
    if model.moe.latent_size >= model.hidden_size:
        rule = f"must be less than model.hidden_size = {model.hidden_size}"
        fix = f"Use at most {model.hidden_size - 1}; K3 uses half"
        yield ConfigProblem(
            "model.moe.latent_size", model.moe.latent_size, rule, fix, "model.latent", ("model.hidden_size",)
        )


def _decay_steps(run: Run) -> Problems:
    kda = run.model.kda
    if kda.dt_min > kda.dt_max:
        rule = f"must not be more than model.kda.dt_max = {kda.dt_max}"
        yield ConfigProblem(
            "model.kda.dt_min",
            kda.dt_min,
            rule,
            f"Use at most {kda.dt_max}",
            "model.dt",
            ("model.kda.dt_max",),
        )


def _learning_rates(run: Run) -> Problems:
    low, peak = run.optim.min_learning_rate, run.optim.learning_rate
    if low > peak:
        yield ConfigProblem(
            "optim.min_learning_rate",
            low,
            f"must not be more than optim.learning_rate = {peak}",
            f"Use at most {peak}",
            "optim.min-learning-rate",
            ("optim.learning_rate",),
        )
    for name, stage in run.curriculum.stages.items():
        key = f"curriculum.stages.{name}.learning_rate"
        if stage.learning_rate.peak is not None and stage.learning_rate.peak < low:
            yield ConfigProblem(
                f"{key}.peak",
                stage.learning_rate.peak,
                f"must be at least optim.min_learning_rate = {low}",
                f"Use {low} or more",
                "stage.peak-learning-rate",
                ("optim.min_learning_rate",),
            )
        if stage.learning_rate.warmup_tokens > stage.tokens:
            yield ConfigProblem(
                f"{key}.warmup_tokens",
                stage.learning_rate.warmup_tokens,
                f"must not be more than the stage's tokens = {stage.tokens}",
                f"Use at most {stage.tokens}",
                "stage.warmup",
                (f"curriculum.stages.{name}.tokens",),
            )


def _fractions(run: Run) -> Problems:
    optim = run.optim
    if optim.schedule is Schedule.wsd and optim.warmup_fraction + optim.decay_fraction > 1:
        rule = f"and optim.warmup_fraction = {optim.warmup_fraction} are together more than the whole run"
        yield ConfigProblem(
            "optim.decay_fraction",
            optim.decay_fraction,
            rule,
            f"Use at most {1 - optim.warmup_fraction:g}",
            "optim.fractions",
            ("optim.warmup_fraction", "optim.schedule"),
        )


def _offload(run: Run) -> Problems:
    optim = run.optim
    if optim.offload is Offload.none:
        return
    settings = (
        ("optim.optimizer", optim.optimizer is Optimizer.muon, "muon", "adamw"),
        ("optim.qk_clip.enabled", optim.qk_clip.enabled, "true", "false"),
    )
    on = [(key, value, instead) for key, is_on, value, instead in settings if is_on]
    if on:
        rule = (
            "updates with AdamW on the host, out of reach of "
            f"{' and '.join(f'{key} = {value}' for key, value, _ in on)}"
        )
        fix = f"Use {' '.join(f'{key}={instead}' for key, _, instead in on)}, or optim.offload=none"
        keys = tuple(key for key, *_ in on)
        yield ConfigProblem("optim.offload", optim.offload.value, rule, fix, "optim.offload", keys)


def _sources(run: Run) -> Problems:
    if not run.data.sources:
        yield ConfigProblem(
            "data.sources",
            {},
            "must name at least one source",
            "Select a data file, such as data=tiny",
            "data.no-sources",
        )


def _order(run: Run) -> Problems:
    order, stages = run.curriculum.order, run.curriculum.stages
    key = "curriculum.order"
    if not order:
        fix = f"Use {list(stages)}" if stages else "Select a curriculum file, such as curriculum=debug"
        yield ConfigProblem(key, order, "must name at least one stage", fix, "curriculum.empty")
    for name in dict.fromkeys(name for name in order if name not in stages):
        meant = closest_word(name, stages)
        fix = f"Did you mean {meant}?" if meant else f"There are: {', '.join(stages) or 'none'}"
        rule = f"names the stage '{name}', which curriculum.stages does not have"
        yield ConfigProblem(key, name, rule, fix, "curriculum.unknown-stage", ("curriculum.stages",))
    for name in sorted({name for name in order if order.count(name) > 1}):
        rule = f"names the stage '{name}' more than once"
        yield ConfigProblem(key, order, rule, "Name every stage once", "curriculum.repeated-stage")
    if order:
        unused = ", ".join(name for name in stages if name not in order)
        if unused:
            rule = f"leaves out stages that curriculum.stages has: {unused}"
            fix = f"Add {unused}, or write a curriculum file without them"
            yield ConfigProblem(key, order, rule, fix, "curriculum.unused-stage")


def _mixes(run: Run) -> Problems:
    sources = run.data.sources
    for stage_name, stage in run.curriculum.stages.items():
        key = f"curriculum.stages.{stage_name}.mix"
        for name in [name for name in stage.mix if name not in sources]:
            meant = closest_word(name, sources)
            fix = f"Did you mean {meant}?" if meant else f"There are: {', '.join(sources) or 'none'}"
            yield ConfigProblem(
                f"{key}.{name}",
                stage.mix[name],
                "names a source that data.sources does not have",
                fix,
                "stage.mix-source",
                ("data.sources",),
            )
        if stage.mix and math.fsum(stage.mix.values()) == 0:
            yield ConfigProblem(
                key, stage.mix, "adds up to 0", "Give at least one source a positive weight", "stage.mix-sum"
            )


def _mtp_weights(run: Run) -> Problems:
    for name, stage in run.curriculum.stages.items():
        if stage.mtp_loss_weight is not None and run.model.mtp.num_layers == 0:
            yield ConfigProblem(
                f"curriculum.stages.{name}.mtp_loss_weight",
                stage.mtp_loss_weight,
                "weighs the loss of a layer that the model does not have, and a stage cannot add it: its "
                "parameters would be new",
                "Set model.mtp.num_layers=1 for the whole run, or leave the weight out",
                "stage.mtp",
                ("model.mtp.num_layers",),
            )


def _layouts(run: Run) -> Problems:
    """Each stage's degrees against the model and the world; the run's own when there is no stage."""
    for name, stage in run.curriculum.stages.items():
        parallel = stage_parallel(run.parallel, stage.parallel)
        yield from layout_problems(run.model, parallel, world_size(run), key_of_stage(name, stage))
    if not run.curriculum.stages:
        yield from layout_problems(
            run.model, run.parallel, world_size(run), lambda field: f"parallel.{field}"
        )
    stages = [stage_parallel(run.parallel, stage.parallel) for stage in run.curriculum.stages.values()]
    yield from offload_problems(stages or [run.parallel])


def _time_limit(run: Run) -> Problems:
    """The ranks stop once the margin is all that is left, after one step when they begin with less."""
    minutes, margin = run.cluster.time_limit_minutes, run.cluster.stop_margin_seconds
    if 0 < 60 * minutes <= margin:
        rule = f"leaves no time to train before cluster.stop_margin_seconds = {margin}"
        fix = f"Use {margin // 60 + 1} or more, a smaller margin, or 0 for no limit"
        key = "cluster.time_limit_minutes"
        yield ConfigProblem(key, minutes, rule, fix, "cluster.time-limit", ("cluster.stop_margin_seconds",))


def _fewer_nodes(run: Run) -> Problems:
    """Every number of nodes that a run may go on with must be possible: which are lost is not ours to say."""
    key, least, nodes = "cluster.min_nodes", run.cluster.min_nodes, run.cluster.nodes
    if least > nodes:
        rule, fix = f"must not be more than cluster.nodes = {nodes}", f"Use at most {nodes}, or 0"
        yield ConfigProblem(key, least, rule, fix, "cluster.min-nodes", ("cluster.nodes",))
    smaller = deepcopy(run)
    for count in range(least or nodes, nodes):
        smaller.cluster.nodes = count
        for problem in (*_layouts(smaller), *_stage_sizes(smaller)):
            rule = f"cannot be: with {count} nodes {problem.key} = {problem.value} {problem.rule}"
            fix = f"Use {count + 1} or more, or 0 to need all nodes"
            yield ConfigProblem(key, least, rule, fix, "cluster.min-nodes", (problem.key, *problem.also))
            return


def _stage_sizes(run: Run) -> Problems:
    for name, stage in run.curriculum.stages.items():
        yield from _stage_size(run, stage, stage_parallel(run.parallel, stage.parallel), name)


def _stage_size(run: Run, stage: Stage, parallel: Parallel, name: str) -> Problems:
    """Tokens into batches, batches into sequences, sequences into micro-batches, tokens over ranks."""
    at = f"curriculum.stages.{name}"
    key_of = key_of_stage(name, stage)
    context, batch = f"{at}.context_tokens", f"{at}.batch_tokens"
    shards = parallel.cp * parallel.tp
    if stage.context_tokens % shards:
        yield ConfigProblem(
            context,
            stage.context_tokens,
            f"must be a multiple of cp*tp = {shards}",
            f"Use {choices(multiples(stage.context_tokens, shards))}",
            "stage.context-shards",
            (key_of("cp"), key_of("tp")),
        )
    elif parallel.cp > 1 and stage.context_tokens // parallel.cp < run.model.kda.conv_kernel - 1:
        need = (run.model.kda.conv_kernel - 1) * parallel.cp
        yield ConfigProblem(
            context,
            stage.context_tokens,
            f"leaves fewer than conv_kernel - 1 = {run.model.kda.conv_kernel - 1} tokens to each of "
            f"cp = {parallel.cp} ranks",
            f"Use at least {need}",
            "stage.conv-halo",
            (key_of("cp"), "model.kda.conv_kernel"),
        )
    if stage.tokens % stage.batch_tokens:
        yield ConfigProblem(
            f"{at}.tokens",
            stage.tokens,
            f"must be a multiple of batch_tokens = {stage.batch_tokens}",
            f"Use {choices(multiples(stage.tokens, stage.batch_tokens))}",
            "stage.tokens-batch",
            (batch,),
        )
    if stage.batch_tokens % stage.context_tokens:
        yield ConfigProblem(
            batch,
            stage.batch_tokens,
            f"must be a multiple of context_tokens = {stage.context_tokens}",
            f"Use {choices(multiples(stage.batch_tokens, stage.context_tokens))}",
            "stage.batch-context",
            (context,),
        )
        return
    world = world_size(run)
    if world % (parallel.tp * parallel.pp * parallel.cp) == 0:
        yield from _micro_batches(stage, parallel, world, at, key_of)


def _micro_batches(
    stage: Stage, parallel: Parallel, world: int, at: str, key_of: Callable[[str], str]
) -> Problems:
    dp = world // (parallel.tp * parallel.pp * parallel.cp)
    micro = stage.micro_batch_sequences
    per_pass = dp * micro
    sequences = stage.batch_tokens // stage.context_tokens
    batch, context = f"{at}.batch_tokens", f"{at}.context_tokens"
    also = (
        context,
        f"{at}.micro_batch_sequences",
        key_of("tp"),
        key_of("pp"),
        key_of("cp"),
        "cluster.nodes",
        "cluster.ranks_per_node",
    )
    if sequences % per_pass:
        yield ConfigProblem(
            batch,
            stage.batch_tokens,
            f"is {sequences} sequences, not a multiple of dp * micro_batch_sequences = {dp} * {micro}",
            f"Use {choices(multiples(stage.batch_tokens, per_pass * stage.context_tokens))}",
            "stage.batch-ranks",
            also,
        )
        return
    passes = sequences // per_pass
    group = per_pass * stage.context_tokens * parallel.pp
    if parallel.pp > 1 and passes < parallel.pp:
        yield ConfigProblem(
            batch,
            stage.batch_tokens,
            f"makes {passes} micro-batches, fewer than {key_of('pp')} = {parallel.pp}",
            f"Use at least {group}",
            "stage.micro-batches-pp",
            also,
        )
    elif parallel.vp > 1 and passes % parallel.pp:
        yield ConfigProblem(
            batch,
            stage.batch_tokens,
            f"makes {passes} micro-batches, which with vp > 1 must be a multiple of "
            f"{key_of('pp')} = {parallel.pp}",
            f"Use {choices(multiples(stage.batch_tokens, group))}",
            "stage.micro-batches-vp",
            (*also, key_of("vp")),
        )


def _hang_limits(run: Run) -> Problems:
    floor, ceiling = run.guards.hang_floor_seconds, run.guards.hang_ceiling_seconds
    if 0 < ceiling < floor:
        yield ConfigProblem(
            "guards.hang_ceiling_seconds",
            ceiling,
            f"must not be less than guards.hang_floor_seconds = {floor}",
            f"Use {floor} or more, or 0 to watch nothing",
            "guards.hang-limits",
            ("guards.hang_floor_seconds",),
        )


def _rollback(run: Run) -> Problems:
    """The spike may come right after a save. Then the oldest of the newest checkpoints must be from before
    what is left out, or there is nothing to go back to."""
    steps, keep, every = run.guards.rollback_steps, run.checkpoint.keep, run.checkpoint.every_steps
    need = -(-(steps - 1) // (keep - 1))
    if run.guards.spike is OnSpike.rollback and every == 0:
        yield ConfigProblem(
            "checkpoint.every_steps",
            every,
            "saves at the end of a stage only, and guards.spike = rollback would go back to there",
            f"Use {need} or more, or another guards.spike",
            "guards.rollback",
            ("guards.spike",),
        )
    elif run.guards.spike is OnSpike.rollback and every < need:
        rule = (
            f"and checkpoint.keep = {keep} do not reach back before the guards.rollback_steps = {steps} "
            "steps that a spike leaves out, so the run would stop in place of going back"
        )
        more = -(-(steps - 1) // every) + 1
        fix = f"Use {need} or more, checkpoint.keep={more} or fewer guards.rollback_steps"
        also = ("checkpoint.keep", "guards.rollback_steps", "guards.spike")
        yield ConfigProblem("checkpoint.every_steps", every, rule, fix, "guards.rollback", also)


RULES: tuple[Callable[[Run], Problems], ...] = (
    _secrets,
    _names,
    _mla_layers,
    _dense_layers,
    _top_k,
    _latent,
    _decay_steps,
    _learning_rates,
    _fractions,
    _offload,
    _sources,
    _order,
    _mixes,
    _mtp_weights,
    context_problems,
    _layouts,
    _stage_sizes,
    fp8_problems,
    _hang_limits,
    _rollback,
    _overrides,
    _fewer_nodes,
    _time_limit,
)
