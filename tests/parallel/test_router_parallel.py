"""Every routing rule on several ranks: the bias bit for bit, and the gradient, of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from k3train.checkpoint.load import load_checkpoint
from k3train.checkpoint.save import Save, save_checkpoint
from k3train.config import schema
from k3train.model.config import make_config
from k3train.model.payload import schedule_config
from k3train.optim.build import allocate_state, build_optimizer
from k3train.parallel.groups import start_groups, stop_groups
from k3train.parallel.layout import make_layout
from k3train.router.audit import Audit
from k3train.router.router import K3Router
from k3train.router.update import set_biases, start_update, update_biases
from tests import model_step
from tests.parity.test_model import MODEL as WHOLE
from tests.ranks import run_ranks

MODEL = schema.Model(hidden_size=16, init_std=0.3)
MODEL.moe = schema.Moe(num_experts=8, top_k=3, expert_ffn_size=8, latent_size=8)
Rule, Scope = schema.RouterRule, schema.BalanceScope
ROUTERS = {
    "quantile": schema.Router(),
    "quantile, averaged": schema.Router(quantile=schema.Quantile(window=3, strength=0.5)),
    "quantile_exact": schema.Router(rule=Rule.quantile_exact),
    "sign": schema.Router(rule=Rule.sign, sign=schema.SignBias(rate=0.01)),
    "aux_loss": schema.Router(rule=Rule.aux_loss),
    "aux_loss, micro_batch": schema.Router(
        rule=Rule.aux_loss, aux_loss=schema.AuxLoss(scope=Scope.micro_batch)
    ),
    "none": schema.Router(rule=Rule.none),
}
LAYOUTS = {
    "dp2": (2, schema.Parallel()),
    "cp2 ep2": (2, schema.Parallel(cp=2, ep=2)),
    "tp2 cp2 etp2": (4, schema.Parallel(tp=2, cp=2, etp=2)),
    "tp2 dp2 ep2": (4, schema.Parallel(tp=2, ep=2)),
}
STEPS, MICROS, TOKENS = 3, 4, 24


def batches():
    """[steps, micro-batches, tokens, hidden], and valid tokens; the last step has none, and one micro-batch
    of each step is mostly padding."""
    g = torch.Generator().manual_seed(4)
    x = torch.randn(STEPS, MICROS, TOKENS, 16, generator=g)
    x[..., :4] += 1.0
    valid = torch.rand(STEPS, MICROS, TOKENS, generator=g) < 0.8
    valid[:, 1, 5:] = False
    valid[-1] = False
    return x, valid


def mine(tensor, pg):
    """This rank's tokens of one micro-batch."""
    for group in (pg.cp, pg.tp):
        tensor = tensor.chunk(group.size())[group.rank()]
    return tensor


def train(rank, world, parallel):
    """For each rule: biases after each step, and the router weight's whole gradient after the second."""
    layout = make_layout(MODEL, parallel, world)
    groups = start_groups(layout, seed=5)
    config = make_config(MODEL, parallel, layout)
    x, valid = batches()
    out = {}
    for name, settings in ROUTERS.items():
        router = K3Router(config, 2, groups.pg, settings=settings)
        biases, metrics = [], []
        for step in range(STEPS):
            router.weight.grad = None
            if name == "quantile":
                router.audit = Audit(3)
            for micro in range(groups.dp_rank, MICROS, layout.dp):
                tokens, counted = mine(x[step, micro], groups.pg), mine(valid[step, micro], groups.pg)
                router(tokens, counted).weights[:, 0].sum().backward()
            if step == 1:
                gradient = router.weight.grad.clone()
                dist.all_reduce(gradient, group=groups.tokens)
            metrics.append(update_biases([router], groups.tokens)[2])
            biases.append(router.bias.clone())
        router(x[0, 0])
        start_update([router], groups.tokens).discard()
        assert torch.equal(router.bias, biases[-1])
        out[name] = torch.stack(biases), gradient, metrics, router.state_dict()
    return out


@pytest.fixture(scope="module")
def reference():
    return run_ranks(1, train, 1, schema.Parallel())[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rule_is_that_of_one_rank(name, reference):
    world, parallel = LAYOUTS[name]
    for found in run_ranks(world, train, world, parallel):
        for rule, (biases, gradient, metrics, state) in reference.items():
            assert torch.equal(found[rule][0], biases), rule
            torch.testing.assert_close(found[rule][1], gradient, atol=1e-5, rtol=1e-4)
            for theirs, ours in zip(found[rule][2], metrics, strict=True):
                # scores of fewer rows at once may round differently, which only this metric shows
                close = (
                    {"exact_error": pytest.approx(ours["exact_error"], rel=1e-4)}
                    if "exact_error" in ours
                    else {}
                )
                assert theirs == ours | close, rule
            assert all(torch.equal(found[rule][3][key], value) for key, value in state.items()), rule


def test_reference_moves_and_stands_still_where_it_should(reference):
    for name, (biases, _, metrics, _) in reference.items():
        moves = ROUTERS[name].rule not in (Rule.none, Rule.aux_loss)
        assert bool(biases[0].any()) is moves, name
        assert torch.equal(biases[2], biases[1]), name  # a step of padding alone
        assert metrics[2]["tokens"] == 0
    plain = reference["none"][1]
    for name in ("aux_loss", "aux_loss, micro_batch"):
        assert (reference[name][1] - plain).abs().max() > 1e-3
    audited = reference["quantile"][2][0]
    assert 0 < audited["exact_error"] < 0.2


def through_a_checkpoint(rank, folder, before, after):
    """Save a whole model that balances by one rule, load it into one that balances by another."""
    states = []
    for router in (before, after):
        model = replace(WHOLE, moe=replace(WHOLE.moe, router=router))
        chunks, groups = model_step.build(model, {}, None)
        routers = [m for m in chunks[0].modules() if isinstance(m, K3Router)]
        if not states:
            for i, each in enumerate(routers):
                set_biases([each], (torch.linspace(-0.2, 0.3, each.num_experts) * (i + 1))[None])
            wrapped = [wrap(chunks[0], groups)]
            optimizer = build_optimizer(schema.Optim(), wrapped, groups)
            allocate_state(optimizer)
            save_checkpoint(
                Save(
                    directory=folder,
                    chunks=wrapped,
                    optimizer=optimizer,
                    train_state={"step": 1},
                    groups=groups,
                    keep=2,
                )
            )
        else:
            load_checkpoint(folder / "step_00000001", chunks=chunks, optimizer=None, groups=groups)
        states.append([each.bias.clone() for each in routers])
        stop_groups()
    return all(torch.equal(a, b) for a, b in zip(*states, strict=True)) and len(states[0]) > 1


def wrap(chunk, groups):
    shared = schedule_config(chunk.config, groups.layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(shared, ddp, chunk, pg_collection=groups.pg)


@pytest.mark.parametrize(
    ("before", "after"), [("quantile, averaged", "aux_loss"), ("sign", "quantile, averaged")]
)
def test_a_checkpoint_of_one_rule_starts_a_run_with_another(before, after, tmp_path):
    assert run_ranks(1, through_a_checkpoint, tmp_path, ROUTERS[before], ROUTERS[after]) == [True]
