"""LatentMoe on several ranks gives one rank's loss and gradients; its checkpoint shards fit any layout."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.tensor_parallel import checkpoint as recomputed

from k3train.config import schema
from k3train.kernels.packing import make_packing
from k3train.model.config import make_config
from k3train.model.moe import LatentMoe
from k3train.optim.build import build_optimizer
from k3train.parallel.groups import start_groups
from k3train.parallel.layout import make_layout
from k3train.router.update import set_biases, update_biases
from tests.optimizer_step import optimizer_step
from tests.ranks import run_ranks

MODEL = schema.Model(hidden_size=16, init_std=0.3)
MODEL.moe = schema.Moe(
    num_experts=8, top_k=3, expert_ffn_size=8, latent_size=8, num_shared_experts=2, shared_ffn_size=6
)
TOKENS = 48  # of the whole batch: every data- and tensor-parallel rank takes a part
LAYOUTS = {
    "dp2": (2, schema.Parallel()),
    "ep2": (2, schema.Parallel(ep=2)),
    "ep4": (4, schema.Parallel(ep=4)),
    "dp2 ep2": (4, schema.Parallel(ep=2)),
    "tp2": (2, schema.Parallel(tp=2)),
    "tp2 etp2": (2, schema.Parallel(tp=2, etp=2)),
    "etp2": (2, schema.Parallel(etp=2)),
    "tp2 ep2": (2, schema.Parallel(tp=2, ep=2)),
    "tp2 etp2 ep2": (4, schema.Parallel(tp=2, etp=2, ep=2)),
    "cp2 ep2": (2, schema.Parallel(cp=2, ep=2)),
    "ep2 allgather": (2, schema.Parallel(ep=2, dispatcher=schema.Dispatcher.allgather)),
    "tp2 etp2 ep2 allgather": (
        4,
        schema.Parallel(tp=2, etp=2, ep=2, dispatcher=schema.Dispatcher.allgather),
    ),
}


def build(parallel, world):
    layout = make_layout(MODEL, parallel, world)
    groups = start_groups(layout, seed=5)
    return LatentMoe(make_config(MODEL, parallel, layout), 2, groups.pg), groups


def whole_state():
    """Parameters of the whole layer, by name."""
    g = torch.Generator().manual_seed(9)
    e, h, z, f, s = 8, 16, 8, 8, 12
    shapes = {
        "router.weight": (e, h),
        "latent_down.weight": (z, h),
        "experts.gate": (e, z, f),
        "experts.up": (e, z, f),
        "experts.down": (e, f, z),
        "latent_norm.weight": (z,),
        "latent_up.weight": (h, z),
        "shared.gate_proj.weight": (s, h),
        "shared.up_proj.weight": (s, h),
        "shared.down_proj.weight": (h, s),
    }
    return {name: torch.randn(shape, generator=g) * 0.4 for name, shape in shapes.items()}


def cut(name, whole, groups):
    """This rank's part of a whole parameter or gradient."""
    pg = groups.pg

    def part(tensor, dim, group):
        return tensor.chunk(group.size(), dim)[group.rank()]

    if name.startswith("experts."):
        return part(part(whole, 0, pg.ep), 1 if name.endswith("down") else 2, pg.expt_tp)
    if name.startswith("shared."):
        return part(whole, 1 if "down" in name else 0, pg.tp)
    return whole


def batch(tokens=TOKENS):
    g = torch.Generator().manual_seed(21)
    x, direction = torch.randn(2, tokens, 1, 16, generator=g).unbind()
    x[:, :, :4] += 1.5  # favours some experts
    valid = torch.arange(tokens) % 12 < 10
    return x, direction, valid


def mine(tensor, groups):
    """This rank's tokens of dim 0: over dp, then cp, then tp, each contiguous."""
    pg = groups.pg
    for group in (pg.dp, pg.cp, pg.tp):
        tensor = tensor.chunk(group.size())[group.rank()]
    return tensor


def step(rank, world, parallel, recompute=False, bias=None, tokens=TOKENS):
    """Loss, input gradient, this rank's parameter gradients after every reduction, bias and metrics."""
    layer, groups = build(parallel, world)
    if bias is not None:
        set_biases([layer.router], torch.tensor([bias]))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(cut(name, whole_state()[name], groups))
    x, direction, valid = batch(tokens)
    local = mine(x, groups).clone().requires_grad_()
    pad = mine(~valid, groups)[None]
    if recompute:
        out = recomputed(lambda t: layer(t, padding_mask=pad)[0], False, local)
    else:
        out = layer(local, padding_mask=pad)[0]
    loss = (out * mine(direction, groups)).sum()
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss, group=groups.tokens)
    for parameter in layer.parameters():
        pg = groups.pg
        if getattr(parameter, "allreduce", True):
            dist.all_reduce(parameter.grad, group=pg.dp_cp)
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=pg.tp)
        else:
            dist.all_reduce(parameter.grad, group=pg.expt_dp)
    metrics = update_biases([layer], groups.tokens)
    gaps = gap_to_whole(layer, local, loss, groups)
    return gaps, layer.router.bias.detach(), metrics


def gap_to_whole(layer, local, loss, groups):
    if dist.get_world_size() == 1:
        grads = {name: p.grad for name, p in layer.named_parameters()}
        return {"loss": loss, "x": local.grad, **grads}
    one = torch.load(REFERENCE)
    gaps = {"loss": (loss - one["loss"]).abs() / one["loss"].abs()}
    gaps["x"] = (local.grad - mine(one["x"], groups)).abs().max()
    for name, parameter in layer.named_parameters():
        whole = one[name]
        gaps[name] = (parameter.grad - cut(name, whole, groups)).abs().max() / max(whole.abs().max(), 1e-9)
    return {name: float(gap) for name, gap in gaps.items()}


REFERENCE = ""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One rank's loss and gradients, in a file that forked ranks read; its bias and metrics."""
    global REFERENCE
    REFERENCE = str(tmp_path_factory.mktemp("moe") / "one.pt")
    whole, bias, metrics = run_ranks(1, step, 1, schema.Parallel())[0]
    torch.save(whole, REFERENCE)
    return bias, metrics


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_rank(name, reference):
    world, parallel = LAYOUTS[name]
    bias, metrics = reference
    for gaps, found, numbers in run_ranks(world, step, world, parallel):
        assert max(gaps.values()) < 1e-5, gaps
        assert torch.equal(found, bias)
        assert numbers == metrics


LAST_THREE = [-9.0] * 5 + [9.0] * 3
"""A bias with which every token takes the last three experts and the others stay empty."""
ONE_TAKES_ALL = [0.0] * 7 + [9.0]
"""A bias with which the last expert is among every token's choices."""


@pytest.fixture(scope="module", params=[LAST_THREE, ONE_TAKES_ALL], ids=["empty", "one takes all"])
def skewed(request, tmp_path_factory):
    """A selection bias with one rank's results for it, over 44 tokens: 33 routes do not divide by 2 or 4."""
    path = str(tmp_path_factory.mktemp("moe") / "skewed.pt")
    whole, bias, metrics = run_ranks(1, step, 1, schema.Parallel(), False, request.param, 44)[0]
    torch.save(whole, path)
    return path, request.param, whole, bias, metrics


@pytest.mark.parametrize("name", ["ep4", "tp2 etp2 ep2", "ep2 allgather", "tp2 etp2 ep2 allgather"])
def test_skewed_and_empty_experts_equal_one_rank(name, skewed, monkeypatch):
    path, given, whole, bias, metrics = skewed
    monkeypatch.setitem(globals(), "REFERENCE", path)
    assert metrics[2]["dead_experts"] == (5 if given is LAST_THREE else 0)
    assert bool(whole["experts.gate"][0].any()) == (given is ONE_TAKES_ALL)
    world, parallel = LAYOUTS[name]
    for gaps, found, numbers in run_ranks(world, step, world, parallel, False, given, 44):
        assert max(gaps.values()) < 1e-5, gaps
        assert torch.equal(found, bias)
        assert numbers == metrics


def test_recomputation_changes_nothing(reference):
    bias, metrics = reference
    for gaps, found, numbers in run_ranks(2, step, 2, schema.Parallel(ep=2), True):
        assert max(gaps.values()) < 1e-5, gaps
        assert torch.equal(found, bias)
        assert numbers == metrics


def test_reference_counts_valid_tokens_only(reference):
    assert reference[1][2]["tokens"] == 40


def packed(rank):
    layer, _ = build(schema.Parallel(tp=2), 2)
    valid = torch.arange(20) < 13
    x = torch.randn(10, 1, 16)
    layer(x, packed_seq_params=make_packing((0, 13, 20), valid))
    return int(layer.router.loads.sum()) // 3


def test_packing_is_cut_over_tensor_ranks():
    assert run_ranks(2, packed) == [10, 3]


def quick_save(state, folder):
    filesystem_async._results_queue = queue.Queue()  # in place of a spawned manager process
    dist_checkpointing.save(state, folder)


def save(rank, world, parallel, folder):
    layer, groups = build(parallel, world)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(cut(name, whole_state()[name], groups))
    set_biases([layer.router], (torch.arange(8.0) / 7)[None])
    state = layer.sharded_state_dict("ffn.", metadata={"dp_cp_group": groups.pg.dp_cp})
    quick_save(state, folder)
    return {key: value.replica_id for key, value in state.items() if isinstance(value, ShardedTensor)}


def load(rank, world, parallel, folder):
    layer, groups = build(parallel, world)
    state = layer.sharded_state_dict("ffn.", metadata={"dp_cp_group": groups.pg.dp_cp})
    loaded = dist_checkpointing.load(state, folder)
    layer.load_state_dict({key.removeprefix("ffn."): value for key, value in loaded.items()})
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, cut(name, whole_state()[name], groups)), name
    assert torch.equal(layer.router.bias, torch.arange(8.0) / 7)
    assert layer.router.bounds.tolist() == [-1.0, 2.0]
    return True


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, schema.Parallel(ep=2)), (1, schema.Parallel())),
        ((1, schema.Parallel()), (4, schema.Parallel(ep=4))),
        ((4, schema.Parallel(tp=2, etp=2, ep=2)), (2, schema.Parallel(ep=2))),
        ((4, schema.Parallel(ep=2)), (2, schema.Parallel(tp=2, etp=2))),
        ((2, schema.Parallel(tp=2)), (4, schema.Parallel(tp=2, etp=1, ep=4))),
    ],
    ids=["ep2-to-1", "1-to-ep4", "tp2etp2ep2-to-ep2", "dp2ep2-to-tp2etp2", "tp2-to-tp2ep4"],
)
def test_checkpoint_fits_another_layout_bitwise(saved, loaded, tmp_path: Path):
    for (world, parallel), what in ((saved, save), (loaded, load)):
        run_ranks(world, what, world, parallel, str(tmp_path))


def drawn(rank, world, parallel):
    layer, _ = build(parallel, world)
    return {n: p.detach() for n, p in layer.named_parameters()}


def test_initial_values_differ_between_experts_and_agree_where_replicated():
    ranks = run_ranks(4, drawn, 4, schema.Parallel(ep=2))
    assert torch.equal(ranks[0]["experts.gate"], ranks[2]["experts.gate"])
    assert not torch.equal(ranks[0]["experts.gate"], ranks[1]["experts.gate"])
    assert not torch.equal(ranks[0]["experts.gate"][0], ranks[0]["experts.gate"][1])
    for name in ("router.weight", "latent_down.weight", "latent_up.weight", "shared.up_proj.weight"):
        assert all(torch.equal(ranks[0][name], other[name]) for other in ranks[1:]), name
        assert 0.2 < float(ranks[0][name].std()) < 0.4
    assert 0.2 < float(ranks[0]["experts.down"].std()) < 0.4


def optimizer_step_of(rank, world, parallel):
    """Gradient norm and whole parameters after one step through megatron-core's DDP and optimizer."""
    layer, groups = build(parallel, world)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(cut(name, whole_state()[name], groups))
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(layer.config, ddp, layer, pg_collection=groups.pg)
    # A large eps makes AdamW's first step nearly proportional to the gradient, which its usual step hides.
    settings = schema.Optim(learning_rate=100.0, eps=10.0, weight_decay=0.0, clip_grad_norm=0.0)
    optimizer = build_optimizer(settings, [wrapped], groups)
    wrapped.zero_grad_buffer()
    x, direction, _ = batch()
    (wrapped(mine(x, groups))[0] * mine(direction, groups)).sum().backward()
    # A data-parallel rank's tokens, whatever part of them this tensor-parallel rank holds.
    tokens = torch.tensor(TOKENS // groups.pg.dp_cp.size())
    finalize_model_grads([wrapped], tokens, pg_collection=groups.pg)
    norm = optimizer_step(optimizer).grad_norm
    gaps = [0.0]
    if world > 1:
        one = torch.load(REFERENCE)["stepped"]
        for name, parameter in layer.named_parameters():
            moved = (one[name] - whole_state()[name]).abs().max()
            gaps.append(float((parameter - cut(name, one[name], groups)).abs().max() / moved))
    return norm, max(gaps), {n: p.detach() for n, p in layer.named_parameters()}


@pytest.fixture(scope="module")
def stepped(reference):
    norm, _, parameters = run_ranks(1, optimizer_step_of, 1, schema.Parallel())[0]
    torch.save({**torch.load(REFERENCE), "stepped": parameters}, REFERENCE)
    return norm


@pytest.mark.parametrize("name", ["dp2", "ep2", "tp2", "tp2 etp2", "tp2 ep2", "tp2 etp2 ep2", "cp2 ep2"])
def test_one_optimizer_step_is_the_same_on_every_layout(name, stepped):
    """The gradient norm counts every expert, shard and replica once, and each gets its whole gradient."""
    world, parallel = LAYOUTS[name]
    for norm, gap, _ in run_ranks(world, optimizer_step_of, world, parallel):
        assert norm == pytest.approx(stepped, rel=1e-5)
        assert gap < 1e-5
