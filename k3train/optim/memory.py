"""What a rank holds in memory, estimated from settings, and whether a device has room for it. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from k3train.config.merge import world_size
from k3train.config.problems import ConfigError, ConfigProblem
from k3train.config.schema import Device, Offload, Optimizer, Precision, Recompute, Run
from k3train.curriculum.stages import StagePlan, context_ahead, stage_table
from k3train.optim.rules import Assignment, Rule, assignments
from k3train.optim.written import most_written
from k3train.parallel.layout import Layout, chunk_layers, make_layout
from k3train.plan.activations import Activations, pinned_bytes
from k3train.plan.parameters import Parameter
from k3train.plan.recompute import recompute_plan
from k3train.plan.split import resolved_parallel

GIB = 2**30
_TENSOR_PARALLEL = (
    *("embedding.weight", "output_head.weight"),
    *(f"attention.{name}_proj.weight" for name in "qkvgbo"),
    *("attention.f_b.weight", "attention.A_log", "attention.dt_bias"),
    *(f"attention.{name}_conv" for name in "qkv"),
    *("attention.q_b.weight", "attention.kv_b.weight"),
    *(f"ffn.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"ffn.shared.{name}_proj.weight" for name in ("gate", "up", "down")),
)
"""Parameters of which a tensor-parallel rank holds its part, by their name within the layer."""

PARTS = ("parameters", "gradients", "optimizer state", "activations", "work space")
"""What memory is for; the last two are there during a step, or an evaluation, only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a rank holds at the fullest moment of a step or an evaluation, by what they are for."""

    pp_rank: int
    """The pipeline rank that needs most."""
    parts: dict[str, int]
    host: int
    """Bytes of the host's memory: the optimizer's state and inputs of layers, where they are kept there."""
    saving: int
    """Bytes of the host's memory beside them for as long as a checkpoint is written: what the rank writes of
    parameters, fp32 master weights and moments."""
    ahead: int | None = None
    """Context length, that of the next stage, at which an evaluation needs more than a step; None if none
    does. Its pass is the work space then."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    @property
    def before(self) -> int:
        """What is there before the first step."""
        return sum(self.parts[name] for name in PARTS[:3])


def stage_memory(run: Run, plan: StagePlan, *, ahead: bool = True) -> Memory:
    """An estimate for the rank of a stage that needs most, ``ahead`` or not of the next stage's context.

    Not in it: the CUDA context, NCCL's buffers, gaps between allocations, and what uneven routing adds.
    """
    return max(_ranks(run, plan, ahead=ahead), key=lambda memory: memory.total)


def saving_bytes(run: Run, plan: StagePlan) -> int:
    """Bytes of the host's memory that a save takes on the rank of a stage that saves most: see ``Memory``."""
    return max(memory.saving for memory in _ranks(run, plan, ahead=False))


def host_shortage(run: Run, free_gib: float) -> str | None:
    """What to say when a save of all ranks of a machine, beside what they keep, does not fit ``free_gib``."""
    ranks = run.cluster.ranks_per_node
    for plan in stage_table(run):
        kept = max(memory.host for memory in _ranks(run, plan, ahead=False)) / GIB
        saving = saving_bytes(run, plan) / GIB
        if (kept + saving) * ranks > free_gib:
            return (
                f"a save in stage {plan.name} takes about {saving:,.1f} GiB of the host's memory for each of "
                f"the {ranks} ranks of a machine, beside {kept:,.1f} that they keep there, and "
                f"{free_gib:,.1f} are free: the kernel may end them; take more machines, which share it, or "
                "fewer ranks a machine"
            )
    return None


def _ranks(run: Run, plan: StagePlan, *, ahead: bool = True) -> list[Memory]:
    """Of each pipeline rank."""
    parallel = resolved_parallel(run, plan.stage)
    layout = make_layout(run.model, parallel, world_size(run))
    tokens = plan.stage.micro_batch_sequences * plan.stage.context_tokens
    passes = plan.sequences_per_step // (layout.dp * plan.stage.micro_batch_sequences)
    graphs = bool(parallel.cuda_graphs) and run.device is not Device.cpu
    activations = Activations(run.model, layout, recompute_plan(parallel), tokens, graphs)
    rules = assignments(run.model, run.optim)
    on_host = run.optim.offload is Offload.cpu
    ranks = [rank_memory(activations, rules, passes, rank, on_host=on_host) for rank in range(layout.pp)]
    longer = context_ahead(run, stage_table(run), plan) if ahead else None
    if longer is None or longer <= tokens:
        return ranks
    return [_one_ahead(memory, activations, longer) for memory in ranks]


def _one_ahead(memory: Memory, activations: Activations, context_tokens: int) -> Memory:
    """The rank in an evaluation at a longer context, where that needs more than a step does."""
    longer = replace(activations, buffer_tokens=context_tokens).forward(memory.pp_rank)
    if longer + activations.recorded() <= memory.parts["activations"] + memory.parts["work space"]:
        return memory
    parts = {**memory.parts, "activations": activations.recorded(), "work space": longer}
    return replace(memory, parts=parts, ahead=context_tokens)


def rank_memory(
    activations: Activations,
    rules: dict[str, Assignment],
    passes: int,
    pp_rank: int,
    *,
    on_host: bool = False,
) -> Memory:
    """What each rank of one pipeline rank holds, with ``passes`` micro-batches a step.

    With ``on_host`` the optimizer's state is on the host.
    """
    model, layout = activations.model, activations.layout
    bf16 = model.precision is Precision.bf16
    parameters = gradients = state = 0
    written: dict[bool, list[int]] = {True: [], False: []}
    largest = {True: 0, False: 0}
    for assigned in rules.values():
        parameter = assigned.parameter
        if not _is_on(parameter, activations, pp_rank):
            continue
        expert = ".experts." in parameter.name
        cut = layout.tp if parameter.local_name in _TENSOR_PARALLEL else 1
        cut = layout.ep * layout.etp if expert else cut
        shared_by = layout.expert_dp if expert else layout.dp * layout.cp
        own = math.prod(parameter.shape) // cut
        size = own * (2 if bf16 and not parameter.fp32 else 4)
        parameters += size
        gradients += own * 4
        state += state_bytes(assigned, bf16=bf16, on_host=on_host) // (cut * shared_by)
        if pp_rank == 0 or parameter.name != "embedding.weight":  # MTP's copy of it is not written
            written[expert] += [size, *[own * 4] * (1 + _moments(assigned))]
        largest[expert] = max(largest[expert], own // shared_by)
    # Gradients pass through two rooms of the largest slice, those of experts through two of their own.
    rooms = sum(2 * pinned_bytes(4 * each) for each in largest.values() if each)
    host = state + rooms if on_host else 0
    chunks = range(layout.vp)
    kept = [activations.chunk(pp_rank, chunk) for chunk in chunks]
    inputs = [activations.on_host(pp_rank, chunk) for chunk in chunks]
    return Memory(
        pp_rank=pp_rank,
        parts={
            "parameters": parameters,
            "gradients": gradients,
            "optimizer state": 0 if on_host else state,
            "activations": most_waiting(kept, layout, pp_rank, passes) + activations.recorded(),
            "work space": activations.working(pp_rank),
        },
        host=host + most_waiting(inputs, layout, pp_rank, passes),
        saving=most_written(written[False], written[True], layout),
    )


def most_waiting(kept: Sequence[int], layout: Layout, pp_rank: int, passes: int) -> int:
    """Most bytes that forward passes hold for their backward passes at once, where one of each chunk of
    ``pp_rank`` holds ``kept``: in megatron-core's 1F1B and interleaved schedules with ``passes``
    micro-batches a step. More passes of the first chunks wait than of the last.
    """
    if layout.vp == 1:
        return kept[0] * min(passes, layout.pp - pp_rank)
    forward = [
        chunk
        for first in range(0, passes, layout.pp)
        for chunk in range(layout.vp)
        for _ in range(min(layout.pp, passes - first))
    ]
    warm_up = 2 * (layout.pp - pp_rank - 1) + (layout.vp - 1) * layout.pp
    held = most = sum(kept[chunk] for chunk in forward[:warm_up])
    for chunk, mirrored in zip(forward[warm_up:], forward, strict=False):  # one forward, one backward
        held += kept[chunk]
        most = max(most, held)
        held -= kept[layout.vp - 1 - mirrored]
    return most


def state_bytes(assigned: Assignment, *, bf16: bool, on_host: bool) -> int:
    """Bytes over all ranks that the optimizer keeps of a parameter: master weights and moments, fp32.

    A parameter that is fp32 is its own master weight, except where the optimizer works on the host.
    """
    own_master = on_host or (bf16 and not assigned.parameter.fp32)
    return 4 * (_moments(assigned) + own_master) * math.prod(assigned.parameter.shape)


def _moments(assigned: Assignment) -> int:
    """How many moments the update rule keeps of a parameter."""
    return 2 if assigned.rule is Rule.adamw else 1


def _is_on(parameter: Parameter, activations: Activations, pp_rank: int) -> bool:
    """Whether this pipeline rank holds a parameter or its part of it."""
    layout = activations.layout
    first, _, rest = parameter.name.partition(".")
    if first == "layers":
        layer = int(rest.partition(".")[0])
        return any(layer in chunk_layers(layout, pp_rank, chunk) for chunk in range(layout.vp))
    # MTP reads embeddings too: the last pipeline rank has a copy for it.
    embeds = first == "embedding" and not activations.model.mtp.num_layers
    return pp_rank == 0 if embeds else pp_rank == layout.pp - 1 or (first == "embedding" and pp_rank == 0)


def check_memory(run: Run, device_gib: float | None = None) -> None:
    """Raise ConfigError with every stage for which a rank's device has no room.

    The device has ``cluster.device_memory_gib``, else ``device_gib``; when neither is given, or 0 is, nothing
    is refused.
    """
    limit = device_gib if run.cluster.device_memory_gib is None else run.cluster.device_memory_gib
    if limit and (problems := list(_problems(run, limit))):
        raise ConfigError(problems)


def check_host_memory(run: Run, free_gib: float) -> None:
    """Raise ConfigError when what the ranks of a machine keep on the host does not fit ``free_gib``."""
    ranks = run.cluster.ranks_per_node
    for plan in stage_table(run):
        need = max(memory.host for memory in _ranks(run, plan)) / GIB
        if need * ranks > free_gib:
            raise ConfigError(
                [
                    ConfigProblem(
                        "",
                        None,
                        f"stage {plan.name} keeps about {_few(need)} GiB on the host for each of the "
                        f"{ranks} ranks of a machine, more than the {_few(free_gib)} GiB that are free there",
                        "Set optim.offload=none or parallel.recompute_offload=false, or take more machines",
                        "stage.host-memory",
                    )
                ]
            )


def _problems(run: Run, limit: float) -> Iterator[ConfigProblem]:
    for plan in stage_table(run):
        step, most = stage_memory(run, plan, ahead=False), stage_memory(run, plan)
        memory = step if step.total > limit * GIB else most
        if memory.total > limit * GIB:
            largest = max(memory.parts, key=lambda name: memory.parts[name])
            where = f" of pipeline rank {memory.pp_rank}" if memory.pp_rank else ""
            fix = _fix(run, plan, largest)
            if memory.ahead:
                where += f" to evaluate at the next stage's {memory.ahead:,} tokens"
                fix = "Set curriculum.eval_one_ahead=false, or raise parallel.cp or parallel.tp"
            yield ConfigProblem(
                "",
                None,
                f"stage {plan.name} needs about {_few(memory.total / GIB)} GiB on a rank{where}, more than "
                f"the {_few(limit)} GiB of its device; the largest part, {largest}, takes "
                f"{_few(memory.parts[largest] / GIB)}",
                f"{fix}; to try it all the same, set cluster.device_memory_gib=0",
                "stage.memory",
            )


def _fix(run: Run, plan: StagePlan, largest: str) -> str:
    recompute = recompute_plan(resolved_parallel(run, plan.stage))
    keeps = {recompute.kda, recompute.mla, recompute.moe, recompute.dense} != {Recompute.full}
    smaller = "raise parallel.cp or parallel.tp, or lower micro_batch_sequences"
    match largest:
        case "activations" if keeps:
            return f"Set parallel.recompute=full, {smaller}"
        case "activations" if not recompute.on_host:
            return f"Set parallel.recompute_offload=true, {smaller}"
        case "activations" | "work space":
            return f"R{smaller[1:]}"
        case "optimizer state":
            fix = "Start more ranks, which share it, or raise parallel.pp, parallel.tp or parallel.ep"
            return f"{fix}, or set optim.offload=cpu" if run.optim.optimizer is Optimizer.adamw else fix
        case _:
            return "Raise parallel.pp, parallel.tp or parallel.ep"


def print_memory(run: Run, console: Console) -> None:
    """One line a stage: GiB on the rank that needs most, by what they are for, and of the host's memory for
    as long as a checkpoint is written, on the rank that saves most."""
    table = Table(title="memory of a rank, GiB (estimate)", title_justify="left", box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for name in (*PARTS, "all"):
        table.add_column(name, justify="right")
    stages = [(plan, stage_memory(run, plan), saving_bytes(run, plan)) for plan in stage_table(run)]
    on_host = any(memory.host for _, memory, _ in stages)
    if on_host:
        table.add_column("on the host", justify="right")
    table.add_column("host, a save", justify="right")
    for plan, memory, saving in stages:
        sizes = (*(memory.parts[name] for name in PARTS), memory.total, *[memory.host] * on_host, saving)
        table.add_row(plan.name, *(_gib(size) for size in sizes))
    console.print(table)


def _few(gib: float) -> str:
    """One decimal, and below 1 two digits that are not nought."""
    return f"{gib:,.1f}" if gib >= 1 else f"{gib:.2g}"


def _gib(size: int) -> str:
    """Three decimals below one GiB, where one would show small models as nothing."""
    return f"{size / GIB:,.1f}" if size >= GIB or not size else f"{size / GIB:.3f}"
