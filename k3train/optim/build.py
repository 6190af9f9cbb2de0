"""The optimizer of a run over megatron-core's distributed optimizer, and how a step uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from k3train.config.schema import Offload, Optim, Optimizer
from k3train.optim import adam
from k3train.optim.decay import is_decayed
from k3train.optim.muon import MARK, MuonAdamW
from k3train.optim.offload import HostAdam
from k3train.optim.qk_clip import QkClip, mla_layers
from k3train.optim.rules import Assignment, Rule, assignments
from k3train.optim.slices import all_parameters, slices_of
from k3train.parallel.groups import Groups


def build_optimizer(optim: Optim, chunks: Sequence[Any], groups: Groups) -> Any:
    """megatron-core's ChainedOptimizer (dense, then expert parameters) over this rank's model chunks.

    ``chunks`` are wrapped in megatron-core's DistributedDataParallel with the distributed optimizer on: each
    data-parallel rank holds fp32 master weights and moments of its slice (ZeRO-1). Master weights are copies
    when parameters are bf16 and the parameters themselves when they are fp32. With ``optim.optimizer=muon``
    each parameter of a K3 model gets its rule of ``k3train.optim.rules``. Every rank of the world must call
    this.
    """
    adam.install()
    from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

    assert all(chunk.ddp_config.use_distributed_optimizer for chunk in chunks)
    bf16 = chunks[0].config.params_dtype is torch.bfloat16
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.learning_rate,
        min_lr=0.0,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad_norm,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
    )
    on_host = optim.offload is Offload.cpu
    # megatron-core then makes no master weights and leaves fp32 gradients beside the parameters' slices.
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = on_host

    def having(name: str, fn: Any) -> Any:
        return ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=fn))

    exempt = having("k3train_no_weight_decay", lambda param, name: not is_decayed(name, param))
    overrides: dict[Any, Any] = {exempt: {"wd_mult": 0.0}}
    rules: dict[str, Assignment] = {}
    if optim.optimizer is Optimizer.muon:
        rules = assignments(chunks[0].config.k3, optim)
        by_muon = having("k3train_muon", lambda param, name: _takes_muon(rules, name))
        overrides[by_muon] = {MARK: "muon"}
    optimizer = get_megatron_optimizer(
        config,
        list(chunks),
        config_overrides=overrides,
        use_gloo_process_groups=False,
        pg_collection=groups.pg,
    )
    # wd_mult is only a note in the group that megatron-core's own scheduler would apply.
    for group in optimizer.param_groups:
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
    if on_host:
        for each in members(optimizer):
            each.optimizer = HostAdam(each.optimizer.param_groups)
            each.init_state_fn = lambda inner, config: inner.allocate()
    elif rules or optim.qk_clip.enabled:
        _add_muon(optim, optimizer, chunks, rules, groups)
    else:
        for each in members(optimizer):
            _round_in_step(each)
    return optimizer


def _round_in_step(member: Any) -> None:
    """On a GPU, let AdamW's kernel write bf16 parameters beside their masters, in the place of another pass
    over both."""
    if not isinstance(member.optimizer, adam.GroupStepAdam):
        return
    pairs = zip(member.shard_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
    shards = {master: shard for some in pairs for shard, master in zip(*some, strict=True)}
    if shards and all(shard.is_cuda and shard.dtype is torch.bfloat16 for shard in shards.values()):
        member.optimizer.copies = shards
        member._copy_main_params_to_model_params = lambda: None


def _add_muon(
    optim: Optim, optimizer: Any, chunks: Sequence[Any], rules: dict[str, Assignment], groups: Groups
) -> None:
    """Put Muon and QK-Clip around the AdamW of each distributed optimizer in the chain."""
    names = {param: _plain(name) for chunk in chunks for name, param in chunk.named_parameters()}
    layers = mla_layers(chunks)
    for member in members(optimizer):
        own = all_parameters(member)
        matrices = [p for p in own if names[p] in rules and rules[names[p]].rule is not Rule.adamw]
        slices = slices_of(member, names)
        here = {id(param) for param in own}
        clips = optim.qk_clip.enabled and any(id(layer.q_b.weight) in here for layer in layers)
        clip = QkClip(optim.qk_clip.threshold, layers, slices, groups.pg.dp_cp) if clips else None
        member.optimizer = MuonAdamW(member.optimizer, optim.muon, slices, matrices, rules, groups, clip=clip)
        member.init_state_fn = lambda inner, config: inner.allocate()


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _takes_muon(rules: dict[str, Assignment], name: str) -> bool:
    plain = _plain(name)
    if plain not in rules:
        raise ValueError(f"{plain} has no optimizer rule: add it to k3train/plan/parameters.py")
    return rules[plain].rule is not Rule.adamw


def members(optimizer: Any) -> list[Any]:
    """The distributed optimizers in the chain that hold parameters of this rank, in the chain's order."""
    return [each for each in optimizer.chained_optimizers if not each.is_stub_optimizer]


def moment_names(member: Any, param: Any) -> tuple[str, ...]:
    """Names of the moments that the update rule of ``param`` keeps beside its master weights."""
    by_muon = isinstance(member.optimizer, MuonAdamW) and param in member.optimizer.matrices
    return ("momentum",) if by_muon else ("exp_avg", "exp_avg_sq")


def allocate_state(optimizer: Any) -> None:
    """Allocate the moments of every parameter slice of this rank, as zeros, where they do not exist yet.

    The first batch then shows the run's full memory, and a checkpoint always holds moments.
    """
    for each in members(optimizer):
        each.init_state_fn(each.optimizer, each.config)


def reload_master_weights(optimizer: Any) -> None:
    """Make master weights of the parameters, which something else than the optimizer has changed."""
    optimizer.reload_model_params()
    for each in members(optimizer):
        if isinstance(each.optimizer, HostAdam):
            each.optimizer.reload()


def optimizer_steps(optimizer: Any) -> int:
    """How many times AdamW has stepped: the t of its bias correction. 0 on a rank without parameters."""
    return max((int(group.get("step", 0)) for group in optimizer.param_groups), default=0)


def set_optimizer_steps(optimizer: Any, steps: int) -> None:
    """Set the t of AdamW's bias correction."""
    for group in optimizer.param_groups:
        group["step"] = steps


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Use ``value`` from the next step on, for every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def gradient_norm(optimizer: Any) -> float:
    """Global L2 norm of the gradients, which are already reduced, as they lie in their buffers; the same on
    every rank.

    It is fp32 and counts every parameter once under every layout. Every rank of the world must call this
    after each backward pass, before ``apply_gradients``.
    """
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def apply_gradients(optimizer: Any, norm: float, *, divisor: int = 1) -> None:
    """Update the parameters with gradients that are divided by ``divisor``, then clipped by ``norm``.

    ``norm`` is that of the divided gradients: what ``gradient_norm`` has returned, over ``divisor``. Both
    factors are applied as the update reads the gradients. Every rank of the world must call this.
    """
    for each in members(optimizer):
        largest = each.config.clip_grad
        clip = min(1.0, largest / (norm + 1e-6)) if largest > 0.0 else 1.0
        adam.set_factor(each.optimizer, clip / divisor)
    optimizer.step_with_ready_grads()


def largest_logit(optimizer: Any) -> float:
    """Largest attention logit that QK-Clip met in the last step in this rank's layers; -inf without any."""
    return max((float(clip.largest) for clip in _clips(optimizer)), default=-math.inf)


def forget_logits(optimizer: Any) -> None:
    """Throw away what QK-Clip has seen since the last step, for passes that no step will follow."""
    for clip in _clips(optimizer):
        clip.reset()


def _clips(optimizer: Any) -> list[QkClip]:
    inner = [member.optimizer for member in members(optimizer)]
    return [each.clip for each in inner if isinstance(each, MuonAdamW) and each.clip is not None]
