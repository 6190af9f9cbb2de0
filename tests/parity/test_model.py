"""The whole model against plain formulas, and what must hold of it on one rank."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from k3train.config import schema
from tests import model_step
from tests.k3_reference import Reference
from tests.model_step import Micro, make_micro
from tests.ranks import run_ranks

MODEL = schema.Model(
    num_layers=6,
    hidden_size=16,
    num_heads=4,
    vocab_size=24,
    init_std=0.1,
    dense_ffn_size=24,
    kda=schema.Kda(head_dim=8, decay_rank=4),
    mla=schema.Mla(q_lora_rank=12, kv_lora_rank=6, qk_head_dim=5, qk_shared_head_dim=3, v_head_dim=7),
    moe=schema.Moe(
        num_experts=4, top_k=2, expert_ffn_size=8, latent_size=8, num_shared_experts=2, shared_ffn_size=6
    ),
    mtp=schema.Mtp(num_layers=1, loss_weight=0.3),
)
BORDERS = (0, 1, 6, 7, 25, 44, 48)
"""Ragged documents, two of them one token long; the last segment is padding."""


def randomise(chunk) -> None:
    """Give every vector a value that a test can see: queries, norms, decay, selection bias."""
    generator = torch.Generator().manual_seed(11)
    for name, p in [*chunk.named_parameters(), *chunk.named_buffers()]:
        if name.endswith(("bounds", "loads")) or not p.is_floating_point():
            continue
        if p.dim() == 1:
            p.data.add_(torch.randn(p.shape, generator=generator) * 0.2)


def slow_decay(chunk) -> None:
    """Make KDA forget so slowly that a state that leaks into the next document shows there."""
    randomise(chunk)
    for name, p in chunk.named_parameters():
        if name.endswith("dt_bias"):
            p.data.fill_(-7.0)


def _reference_loss(reference: Reference, micro: Micro) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for start, stop in itertools.pairwise(micro.borders):
        part = slice(start, stop)
        trunk = reference.trunk(micro.tokens[part])
        logits = reference.head(reference.norm(trunk, "final_norm"))
        total = total + F.cross_entropy(logits, micro.labels[part], reduction="sum", ignore_index=-100)
        ahead = reference.mtp(trunk, micro.labels[part].clamp(min=0))
        losses = F.cross_entropy(ahead, micro.labels_mtp[part], reduction="sum", ignore_index=-100)
        total = total + MODEL.mtp.loss_weight * losses
    return total


def test_loss_and_every_gradient_equal_plain_formulas():
    micro = make_micro(BORDERS, MODEL.vocab_size, seed=0)
    got = model_step.step(MODEL, [micro], prepare=randomise)
    weights = {key: value.double() for key, value in got.weights.items()}
    for key in got.gradients:
        weights[key].requires_grad_()
    reference = Reference(MODEL, weights)
    loss = _reference_loss(reference, micro)
    assert min(reference.margins) > 1e-5  # otherwise fp32 could choose other experts
    loss.backward()
    assert got.loss == pytest.approx(loss.item(), rel=1e-6)
    unseen = [key for key in weights if key not in got.gradients]
    assert all(key.endswith((".bias", ".bounds")) for key in unseen), unseen
    for key, grad in got.gradients.items():
        want = weights[key].grad
        if want is None:  # layer 0 reads the embedding as it is, so its query takes no part
            assert key.startswith("layers.0.attention_mix.")
            want = torch.zeros_like(weights[key])
        error = (grad - want).abs().max()
        assert error <= 2e-5 * want.abs().max() + 1e-6, (key, error, want.abs().max())


def _outputs(rank: int, micro: Micro, prepare):
    """Logits, per-token losses and, by document, the gradient of its loss at every token's embedding."""
    chunks, groups = model_step.build(MODEL, {}, prepare)
    packing = model_step.packing(micro, groups)
    tokens, labels, ahead = micro.tokens[None], micro.labels[None], micro.labels_mtp[None]
    logits = chunks[0](tokens, packing).detach()
    seen = []
    chunks[0].embedding.register_forward_hook(
        lambda module, args, out: seen.append(out) or out.requires_grad_()
    )
    losses = chunks[0](tokens, packing, labels, ahead)
    grads = []
    for start, stop in itertools.pairwise(micro.borders):
        (grad,) = torch.autograd.grad(losses[0, start:stop].sum(), seen[0], retain_graph=True)
        grads.append(grad[0])
    return logits[0], losses[0].detach(), grads


def test_documents_do_not_see_each_other():
    micro = make_micro(BORDERS, MODEL.vocab_size, seed=1, padding=False)
    logits, losses, grads = run_ranks(1, _outputs, micro, slow_decay)[0]
    for index in (0, 2, 3):
        start, stop = BORDERS[index : index + 2]
        other = replace(micro, tokens=micro.tokens.clone())
        other.tokens[start:stop] = (other.tokens[start:stop] + 7) % MODEL.vocab_size
        changed_logits, changed_losses, changed_grads = run_ranks(1, _outputs, other, slow_decay)[0]
        outside = torch.ones(BORDERS[-1], dtype=torch.bool)
        outside[start:stop] = False
        assert not torch.allclose(changed_logits[start:stop], logits[start:stop])
        torch.testing.assert_close(changed_logits[outside], logits[outside], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(changed_losses[outside], losses[outside], rtol=1e-5, atol=1e-6)
        for document, grad in enumerate(changed_grads):
            if document != index:
                # Not to the bit: experts then work on other numbers of rows.
                assert (grad - grads[document]).abs().max() <= 2e-5 * grad.abs().max()
    for (start, stop), grad in zip(itertools.pairwise(BORDERS), grads, strict=True):
        assert not grad[:start].any()
        assert not grad[stop:].any()


def test_logits_equal_plain_formulas():
    micro = make_micro(BORDERS, MODEL.vocab_size, seed=2)
    weights = model_step.step(MODEL, [micro], prepare=slow_decay).weights
    logits, losses, _ = run_ranks(1, _outputs, micro, slow_decay)[0]
    reference = Reference(MODEL, {key: value.double() for key, value in weights.items()})
    want = torch.cat([reference(micro.tokens[a:b]) for a, b in itertools.pairwise(BORDERS)])
    torch.testing.assert_close(logits.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    assert losses.dtype == torch.float32
    assert not losses[micro.labels == -100].any()


def _without_gradient(rank: int):
    chunks, groups = model_step.build(MODEL, {}, None)
    micro = make_micro(BORDERS, MODEL.vocab_size, seed=6)
    place = model_step.packing(micro, groups)
    losses = chunks[0](micro.tokens[None], place, micro.labels[None], micro.labels_mtp[None])
    losses.sum().backward()
    query = chunks[0].get_parameter("layers.0.attention_mix.query")
    return [name for name, p in chunks[0].named_parameters() if p.grad is None], query.grad


def test_every_parameter_takes_part_in_every_backward_pass():
    missing, unused = run_ranks(1, _without_gradient)[0]
    assert missing == []  # gradient buckets wait for each of their parameters
    assert not unused.any()


def _fresh_mix(rank: int):
    chunks, _ = model_step.build(MODEL, {}, None)
    sources = tuple(torch.randn(5, 1, 16) for _ in range(4))
    mixes = [m for m in chunks[0].modules() if type(m).__name__ == "DepthMix"]
    return sources, [mix(sources).detach() for mix in mixes]


def test_a_new_model_takes_the_mean_over_depth():
    sources, mixed = run_ranks(1, _fresh_mix)[0]
    assert len(mixed) == 2 * MODEL.num_layers + 1
    for value in mixed:
        torch.testing.assert_close(value, torch.stack(sources).mean(0))


def _loads(rank: int, recompute: schema.Recompute):
    chunks, groups = model_step.build(MODEL, {"recompute": recompute}, randomise)
    micros = [make_micro(BORDERS, MODEL.vocab_size, seed=s) for s in range(2)]
    model_step.train_step(chunks, micros, groups)
    return {name: b.clone() for name, b in chunks[0].named_buffers() if name.endswith("loads")}


def test_full_recomputation_changes_nothing_and_counts_tokens_once():
    micro = make_micro(BORDERS, MODEL.vocab_size, seed=3)
    kept = model_step.step(MODEL, [micro], prepare=randomise)
    again = model_step.step(MODEL, [micro], kept.weights, recompute=schema.Recompute.full)
    assert again.loss == kept.loss
    for key, grad in kept.gradients.items():
        assert (grad - again.gradients[key]).abs().max() <= 1e-5 * grad.abs().max(), key
    kept, again = (run_ranks(1, _loads, r)[0] for r in (schema.Recompute.none, schema.Recompute.full))
    valid = 2 * BORDERS[-2]
    assert len(kept) == 6
    for name, loads in kept.items():
        assert loads.sum() == valid * MODEL.moe.top_k, name
        torch.testing.assert_close(again[name], loads, rtol=0, atol=0)


def _dtypes(rank: int):
    model = replace(MODEL, precision=schema.Precision.bf16)
    chunks, groups = model_step.build(model, {}, None)
    micro = make_micro(BORDERS, MODEL.vocab_size, seed=4)
    loss = model_step.train_step(chunks, [micro], groups)
    everything = [*chunks[0].named_parameters(), *chunks[0].named_buffers()]
    return {name: p.dtype for name, p in everything if p.is_floating_point()}, loss


def test_a_bf16_model_keeps_its_sensitive_parameters_in_fp32():
    dtypes, loss = run_ranks(1, _dtypes)[0]
    fp32 = "norm norm.weight query norm_weight A_log dt_bias _conv router.weight router.bias router.bounds"
    for name, dtype in dtypes.items():
        wide = name.endswith(tuple(fp32.split()))
        assert dtype == (torch.float32 if wide else torch.bfloat16), name
    assert math.isfinite(loss)
