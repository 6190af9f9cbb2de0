"""Triton kernels run by Triton's interpreter on the CPU, in a process of its own, against plain torch."""

from __future__ import annotations

import json

from tests.interpreted import interpret, needs_triton

pytestmark = needs_triton

PROGRAM = """
import json
import torch
from k3train.kernels.kda.triton_scan import kda_scan
from tests.gpu import kda_stages
from tests import gluon_interpreted
from k3train.kernels import adjacent, cross_entropy, gated_norm, short_conv
from k3train.kernels import triton_conv, triton_cross_entropy, triton_gated_norm, triton_grouped
from k3train.kernels import attn_res, keys, permute, rms_norm, situ
from k3train.kernels import triton_embedding, triton_gate, triton_keys, triton_mix, triton_permute
from k3train.kernels import triton_rms_norm, triton_situ
from k3train.router import triton_router
from k3train.router.weights import route_weights
torch.manual_seed(0)
triton_conv._TILES = 2
errors = {}


def compare(name, got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        b = b.detach().double()
        # the interpreter cuts to bf16 where a GPU rounds: 2^-7 at most
        allowed = 2**-7 if a.dtype is torch.bfloat16 else 1e-5
        errors[f"{name} {i}"] = float((a.double() - b).norm() / b.norm()) / allowed


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


triton_conv._CHANNELS = 16
for b, t, c, taps, parts, borders in [
    (1, 70, 66, 4, 3, (0, 1, 2, 33, 34, 70)), (2, 35, 3, 4, 1, None),
    (1, 3, 64, 4, 2, None), (1, 40, 64, 1, 1, None),
]:
    x, grad, weight = bf16(b, t, c), bf16(b, t, c), torch.randn(c, taps)
    position = torch.arange(t)
    for first, last in zip(borders or (), (borders or ())[1:]):
        position[first:last] = torch.arange(last - first)
    wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
    y = short_conv._ShortConv.apply(wide[0], None, wide[1], position)
    want = [y, *torch.autograd.grad(y, wide, grad.double())]
    grads = tuple(part.contiguous() for part in grad.chunk(parts, 2))
    xs = x.chunk(parts, 2)[::-1]  # in memory the other way round
    taken = torch.cat(weight.chunk(parts)[::-1])
    got = [torch.cat(triton_conv.forward(xs, taken, position).unbind()[::-1], 2)]
    grad_xs, grad_weight = triton_conv.backward(grads[::-1], xs, taken, position)
    assert adjacent.joined(grad_xs[::-1], 2) is not None
    got += torch.cat(grad_xs[::-1], 2), torch.cat(grad_weight.chunk(parts)[::-1])
    compare(f"conv {b} {t} {taps}", got, want)

x, gate, grad, weight = bf16(77, 128), bf16(11, 900)[:, :896], bf16(77, 128), torch.randn(128)
rows = gate
gate = gate.reshape(77, 128)
wide = [v.double().requires_grad_() for v in (x, weight, gate)]
y = gated_norm.gated_rms_norm(*wide, 1e-3)
want = [y, *torch.autograd.grad(y, wide, grad.double())]
got = [triton_gated_norm.forward(x, weight, rows, 1e-3)]
got += triton_gated_norm.backward(grad, x, weight, rows, 1e-3)
compare("gated norm", [*got[:3], got[3].view(77, 128)], want)

for c, weighted in ((300, True), (70, False)):
    both, grad = bf16(9, 2 * c), bf16(9, c)
    weight = torch.randn(9) if weighted else None
    up, gate = both.chunk(2, 1)
    wide = [v.double().requires_grad_() for v in (gate, up, weight) if v is not None]
    y = situ.situ_glu(wide[0], wide[1], 2.0, 1.5, *wide[2:])
    want = [y, *torch.autograd.grad(y, wide, grad.double())]
    got = [triton_situ.forward(gate, up, 2.0, 1.5, weight)]
    got += [g for g in triton_situ.backward(grad, gate, up, 2.0, 1.5, weight) if g is not None]
    assert adjacent.joined(got[2:0:-1], 1) is not None
    compare(f"situ {c}", got, want)

with gluon_interpreted.in_place():
    from k3train.kernels import triton_mix_slots
for n, c, w, slots in ((5, 40, 3, 0), (3, 64, 2, 0), (5, 40, 3, 1), (1, 300, 2, 1), (4, 64, 10, 1)):
    sources, grad = [torch.randn(n, c) for _ in range(w)], torch.randn(n, c)
    direction = torch.randn(c) * c**-0.5
    wide = [v.double().requires_grad_() for v in (direction, *sources)]
    y = attn_res.mix_reference(wide[1:], wide[0], torch.ones_like(wide[0]), 1e-3)
    want = [y, *torch.autograd.grad(y, wide, grad.double())]
    out, logsum = triton_mix.forward(sources, direction, 1e-3)
    triton_mix.programs_with_slots = lambda tensors, device: slots
    grad_direction, grads = triton_mix.backward(grad, sources, direction, out, logsum, 1e-3)
    compare(f"mix {w} {slots}", [out, grad_direction, *grads], want)

logits, index = 5 * bf16(5, 9000), torch.tensor([0, 8999, 5000, 4096, 17])
got, want = triton_cross_entropy.statistics(logits, index), cross_entropy._statistics(logits.double(), index)
compare("statistics", got, want)
normalizer, mine, grad = got[1].log() + got[0], torch.tensor([1, 1, 0, 1, 0]).bool(), torch.randn(5)
want = cross_entropy._gradient(logits.double(), index, mine, normalizer.double(), grad.double())
compare("gradient", [triton_cross_entropy.gradient_(logits, index, mine, normalizer, grad)], [want])
h, d = 2, 32
start, maps, sent = torch.randn(1, h, d, d), torch.randn(5, h, d, d) / 8, torch.randn(4, h, d, d)
chains = torch.tensor([[0, 3, 0, -1], [3, 2, -1, 1], [5, 2, -2, 0]], dtype=torch.int32)
steps = [[2, 0, -1], [0, 3, 4], [1, -1, -1], [-1, 1, -1], [-1, 2, 1], [-1, -1, 2], [-1, -1, 3]]
steps = torch.tensor(steps, dtype=torch.int32)
for transposed in (False, True):
    states, end = torch.full((3, h, d, d), torch.nan), torch.full((2, h, d, d), torch.nan)
    want = [states.double(), end.double()]
    wide = [v.double() for v in (start, sent, maps)]
    kda_stages.scan_rows(chains, steps, *wide, *want, transposed)
    kda_scan[(2, h, 3)](
        chains, steps, start, sent, maps, states, end, H=h, D=d, BV=16, TRANSPOSED=transposed, HAS_START=True
    )
    compare(f"scan {transposed}", [states, end], want)

for counts in ([3, 0, 40, 1], [0, 0, 0, 0]):
    rows, grad, total = torch.randn(sum(counts), 40), torch.randn(sum(counts), 35), torch.randn(4, 40, 35)
    want = total.double()
    for i, (x, g) in enumerate(zip(rows.double().split(counts), grad.double().split(counts), strict=True)):
        want[i] += x.T @ g
    groups = triton_grouped.list_groups(torch.tensor(counts), len(rows))
    triton_grouped.add_weight_gradient(total, rows, grad, groups.ends)
    compare(f"experts {counts}", [total], [want])

rows = torch.tensor([3] * 20 + [7, 0, 3, 5, 0] + [7] * 16)
total, grad = torch.randn(7, 300), bf16(41, 300)
want = total.double().index_add(0, rows[rows < 7], grad.double()[rows < 7])
triton_embedding.add_rows(total, grad, rows)
compare("embedding", [total], [want])

triton_rms_norm._PROGRAMS = 2  # each of several rows
x, grad, weight = torch.randn(5, 90)[:, :77], torch.randn(5, 77), torch.randn(77)
wide = [v.double().requires_grad_() for v in (x, weight)]
y = rms_norm.rms_norm(*wide, 1e-3)
out, scale = triton_rms_norm.forward(x, weight, 1e-3)
got = [out, *triton_rms_norm.backward(grad, x, weight, scale)]
compare("rms norm", got, [y, *torch.autograd.grad(y, wide, grad.double())])

order, rows = permute.sort_routes(torch.randint(5, (13, 3)), 5), torch.randn(39, 1100)
got = triton_permute.gather_sum(rows, order.position, 3)
compare("unpermute", [got], [permute.unpermute(rows.double(), order)])

counts = torch.tensor([0, 700, 1, 63, 128, 129, 0])
groups = triton_grouped.list_groups(counts, int(counts.sum()))
ends = counts.cumsum(0).tolist()
tiles = []
for e, (count, end) in enumerate(zip(counts.tolist(), ends)):
    tiles += [(first, end, e) for first in range(end - count, end, 128)]
assert groups.ends.tolist() == ends
assert [tuple(tile) for tile in groups.tiles[: int(groups.total[0])].tolist()] == tiles

x, gate, grad = bf16(9, 70), bf16(9, 90)[:, :70], bf16(9, 70)
wide = [v.double().requires_grad_() for v in (x, gate)]
y = wide[0] * torch.sigmoid(wide[1])
want = [y, *torch.autograd.grad(y, wide, grad.double())]
compare("gate", [triton_gate.forward(x, gate), *triton_gate.backward(grad, x, gate)], want)

h, d, s, e = 19, 24, 8, 12
kv, shared = bf16(5, h * (d + e)), bf16(5, 30)[:, :s]
wide = [v.double().requires_grad_() for v in (kv, shared)]
k, v = keys.keys_and_values(*wide, h, d)
grads = bf16(h, 5, d + s).transpose(0, 1), bf16(5, h, e)
want = [k, *torch.autograd.grad([k, v], wide, [g.double() for g in grads])]
compare("keys", [triton_keys.forward(kv, shared, h, d), *triton_keys.backward(*grads, d)], want)

experts = torch.randint(0, 20, (1500,)).to(torch.int16)
order = experts.argsort(stable=True)
position, counts = triton_permute.invert(order, experts, 20)
assert torch.equal(position[order], torch.arange(1500))
assert torch.equal(counts, experts.bincount(minlength=20))

chosen, logits = torch.rand(70, 20).topk(3).indices, torch.randn(70, 20)
wide, grad = logits.double().requires_grad_(), torch.randn(70, 3)
y = route_weights(wide, chosen)
got = [triton_router.weights(logits, chosen, 1e-20)]
got += [triton_router.weights_backward(grad, logits, chosen, 1e-20)]
compare("route weights", got, [y, *torch.autograd.grad(y, wide, grad.double())])
for across in (False, True):
    x = torch.randn(7, 30)
    # the interpreter cuts where a GPU rounds: the three terms still add up to x
    parts = triton_router.split(x, (2, 0, 0, 1), across=across).double().chunk(4, dim=int(across))
    compare(f"split {across}", [(parts[0] + parts[2] + parts[3]).float(), parts[1].bfloat16()], [x, parts[2]])
    assert float((parts[1] - x).abs().max()) < 0.05
x = torch.randn(7, 90)
compare("terms", [triton_router.add_terms(*x.split(30, 1))], [x.double().view(7, 3, 30).sum(1)])
print(json.dumps(errors))
"""


def test_kernels_equal_plain_torch() -> None:
    done = interpret(PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout)
    assert len(errors) == 81, errors
    assert {name: e for name, e in errors.items() if not e < 1} == {}
