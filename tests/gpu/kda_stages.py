"""The chunked algebra of the Hopper KDA kernels, stage by stage, in plain torch.

One document, all heads; every stage returns what the kernel of that name writes. ``cut`` rounds a tensor
where the kernels round to bf16 (identity in float64 tests).
"""

from itertools import pairwise

import torch

C, B = 64, 32


def keep(x):
    return x


def bf16(x):
    return x.to(torch.bfloat16).to(x.dtype)


def prepare(q, k, z, A_log, dt_bias, bound):
    """[t, h, d] inputs of one document -> chunked normalised q, k and natural-log gates [h, n, 64, d]."""
    t, h, d = q.shape
    n = -(-t // C)

    def chunk(x):
        x = torch.cat([x, x.new_zeros(n * C - t, h, x.shape[-1])])
        return x.view(n, C, h, -1).permute(2, 0, 1, 3)

    s = torch.sigmoid(A_log.exp()[:, None] * (z + dt_bias.view(h, d)))
    rq = (q.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
    rk = (k.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
    return chunk(q * rq) * d**-0.5, chunk(k * rk), chunk(bound * s), chunk(s), chunk(rq), chunk(rk)


def halves(x):
    return x[..., :B, :], x[..., B:, :]


def factors(g, bound):
    """Per 32-token block: decay from its start, to its end, and around the fixed causal anchor."""
    L = g.cumsum(-2)
    shift = (B - 1) * abs(bound) / 2
    A = L + shift
    return L.exp(), (L[..., -1:, :] - L).exp(), A.exp(), (-A).exp(), L[..., -1, :].exp()


def prep(q, k, g, beta, bound, cut=keep):
    (q0, q1), (k0, k1), (g0, g1) = halves(q), halves(k), halves(g)
    w0, w1 = halves(k * beta[..., None])
    F0, B0, x0, y0, e0 = factors(g0, bound)
    F1, B1, x1, y1, e1 = factors(g1, bound)
    out = {
        "kh": torch.cat([k0 * F0, k1 * F1 * e0[..., None, :]], -2),
        "qh": torch.cat([q0 * F0, q1 * F1 * e0[..., None, :]], -2),
        "kt": torch.cat([w0 * B0 * e1[..., None, :], w1 * B1], -2),
        "dec": e0 * e1,
    }
    low = torch.ones(B, B, dtype=torch.bool, device=q.device).tril()

    def scores(a0, a1, mask):
        zero = q.new_zeros(())
        d0 = torch.where(mask, cut(a0 * x0) @ cut(w0 * y0).mT, zero)
        d1 = torch.where(mask, cut(a1 * x1) @ cut(w1 * y1).mT, zero)
        o = cut(a1 * F1) @ cut(w0 * B0).mT
        return torch.cat([torch.cat([d0, torch.zeros_like(d0)], -1), torch.cat([o, d1], -1)], -2)

    out["aqk"] = scores(q0, q1, low)
    out["akk"] = scores(k0, k1, low.tril(-1))
    out["aqk"].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1) * beta)
    return {n: cut(x) if n not in ("dec", "akk") else x for n, x in out.items()}


def inverse(akk):
    eye = torch.eye(C, dtype=akk.dtype, device=akk.device)
    return torch.linalg.inv(eye + akk) - eye


def chain(p, tb, v, S, cut=keep):
    """v [h, n, 64, d]; S [h, d, d] -> o, corrections / beta, states entering each chunk, the final state."""
    o, U, hs = [], [], []
    for i in range(v.shape[1]):
        Sb = cut(S)
        r = v[:, i] - p["kh"][:, i] @ Sb
        u = cut(r + tb[:, i] @ cut(r))
        o.append(p["qh"][:, i] @ Sb + p["aqk"][:, i] @ u)
        hs.append(Sb)
        U.append(u)
        S = p["dec"][:, i, :, None] * S + p["kt"][:, i].mT @ u
    return torch.stack(o, 1), torch.stack(U, 1), torch.stack(hs, 1), S


def chain_backward(p, tb, do, dS, cut=keep):
    """-> dv, the gradient of the state leaving each chunk, and of the initial state."""
    n = do.shape[1]
    dv, dhs = [None] * n, [None] * n
    for i in reversed(range(n)):
        Sb = dhs[i] = cut(dS)
        dU = p["aqk"][:, i].mT @ do[:, i] + p["kt"][:, i] @ Sb
        dv[i] = X = cut(dU + tb[:, i].mT @ cut(dU))
        dS = p["dec"][:, i, :, None] * dS + p["qh"][:, i].mT @ do[:, i] - p["kh"][:, i].mT @ X
    return torch.stack(dv, 1), torch.stack(dhs, 1), dS


def score(o, v, beta, do, U, dv, cut=keep):
    low = torch.ones(C, C, dtype=torch.bool, device=o.device).tril(-1)
    xu = (dv * U).sum(-1)
    zero = o.new_zeros(())
    return {
        "dA": cut(torch.where(low, do @ U.mT, zero)),
        "dB": cut(torch.where(low, -dv @ U.mT, zero)),
        "dd": (do * U).sum(-1) * beta,
        "sq": (do * o).sum(-1),
        "sk": 2 * xu - (dv * v).sum(-1),
        "beta": beta,
        "dbeta": xu * (1 - beta),
    }


def gradient(q, k, g, bound, do, U, dv, hs, dhs, sc, rq, rk, s, a, cut=keep):
    """-> dq, dk (of the raw inputs) and dz, all [h, n, 64, d]."""
    d = q.shape[-1]
    scale = d**-0.5
    (q0, q1), (k0, k1), (g0, g1) = halves(q), halves(k), halves(g)
    F0, B0, x0, y0, e0 = factors(g0, bound)
    F1, B1, x1, y1, e1 = factors(g1, bound)
    (o0, o1), (v0, v1), (u0, u1) = halves(do), halves(dv), halves(U)
    A, Bm = sc["dA"], sc["dB"]
    rate0, rate1 = halves(sc["beta"][..., None])
    last = (hs * dhs).sum(-1) * e0 * e1
    y0, y1, B0, B1 = y0 * rate0, y1 * rate1, B0 * rate0, B1 * rate1
    yo, qF, kF = cut(k0 * B0), cut(q1 * F1), cut(k1 * F1)

    def diagonal(q, k, x, y, A, Bm):
        y_, qx, kx = cut(k * y), cut(q * x), cut(k * x)
        tq, tk, tc = A @ y_, Bm @ y_, A.mT @ qx + Bm.mT @ kx
        return tq * x, tk * x + tc * y, qx * tq + kx * tk - y_ * tc

    # block 1
    tq = o1 @ hs.mT * e0[..., None, :] + A[..., B:, :B] @ yo
    tk = -(v1 @ hs.mT) * e0[..., None, :] + Bm[..., B:, :B] @ yo
    tc = u1 @ dhs.mT * B1
    dq1, dk1 = tq * F1, tk * F1 + tc
    last = last + (tc * k1).sum(-2)
    G1 = qF * tq + kF * tk - tc * k1
    a_, b_, c_ = diagonal(q1, k1, x1, y1, A[..., B:, B:], Bm[..., B:, B:])
    dq1, dk1, G1 = dq1 + a_, dk1 + b_, G1 + c_
    # block 0
    dq0, dk0 = o0 @ hs.mT * F0, -(v0 @ hs.mT) * F0
    G0 = q0 * dq0 + k0 * dk0
    tc = u0 @ dhs.mT * e1[..., None, :]
    last = last + (yo * tc).sum(-2)
    tc = tc + A[..., B:, :B].mT @ qF + Bm[..., B:, :B].mT @ kF
    G0 = G0 - yo * tc
    dk0 = dk0 + tc * B0
    a_, b_, c_ = diagonal(q0, k0, x0, y0, A[..., :B, :B], Bm[..., :B, :B])
    dq0, dk0, G0 = dq0 + a_, dk0 + b_, G0 + c_
    dq, dk = torch.cat([dq0, dq1], -2), torch.cat([dk0, dk1], -2)
    R = torch.cat([G0, G1], -2).flip(-2).cumsum(-2).flip(-2) + last[..., None, :]
    dz = R * bound * s * (1 - s) * a[:, None, None, None]
    dd, sq, sk = (sc[n][..., None] for n in ("dd", "sq", "sk"))
    return rq * ((dq + dd * k) * scale - q * sq / scale), rk * (dk + dd * q - k * sk), dz


def chain_rows(x, v, rows, entering, leaving, o=None, hs=None, us=None):
    """What ``kda_chain`` does with segments: x [chunks, h, 64, .] by name, v and o [tokens, h, d]."""
    h, d = v.shape[1:]
    for start, tokens, chunk, i_in, i_out, identity in rows.tolist():
        S = entering[i_in] if i_in >= 0 and entering is not None else v.new_zeros(h, d, d)
        S = torch.eye(d, dtype=v.dtype).expand(h, d, d) if identity else S
        for c in range(chunk, chunk - (-tokens // C)):
            at = slice(start + (c - chunk) * C, start + min(tokens, (c - chunk + 1) * C))
            n = at.stop - at.start
            R = -x["kh"][c] @ S
            R[:, :n] += 0 if identity else v[at].transpose(0, 1)
            u = R + x["tb"][c] @ R
            if o is not None:
                o[at] = (x["qh"][c] @ S + x["aqk"][c] @ u)[:, :n].transpose(0, 1)
            if hs is not None:
                hs[c], us[c] = S, u
            S = x["dec"][c][..., None] * S + x["kt"][c].mT @ u
        if leaving is not None and i_out >= 0:
            leaving[i_out] = S


def chain_back_rows(x, do, rows, entering, leaving, dhs=None, dv=None):
    """What ``kda_bchain`` does with segments."""
    h, d = do.shape[1:]
    for start, tokens, chunk, i_in, i_out, _ in rows.tolist():
        dS = entering[i_in] if i_in >= 0 and entering is not None else do.new_zeros(h, d, d)
        for c in reversed(range(chunk, chunk - (-tokens // C))):
            at = slice(start + (c - chunk) * C, start + min(tokens, (c - chunk + 1) * C))
            g = do.new_zeros(h, C, d)
            g[:, : at.stop - at.start] = do[at].transpose(0, 1)
            dU = x["aqk"][c].mT @ g + x["kt"][c] @ dS
            X = dU + x["tb"][c].mT @ dU
            if dhs is not None:
                dhs[c], dv[at] = dS, X[:, : at.stop - at.start].transpose(0, 1)
            dS = x["dec"][c][..., None] * dS + x["qh"][c].mT @ g - x["kh"][c].mT @ X
        if leaving is not None and i_out >= 0:
            leaving[i_out] = dS


def scan_rows(chains, steps, start, written, transition, states, end, transposed):
    """What ``kda_scan`` does."""
    some = states if states is not None else end
    for first, count, i_start, i_end in chains.tolist():
        S = torch.zeros_like(some[0]) if i_start < 0 else start[i_start]
        S = torch.eye(S.shape[-1], dtype=S.dtype).expand_as(S) if i_start == -2 else S
        for i_state, i_written, i_transition in steps[first : first + count].tolist():
            if i_state >= 0:
                states[i_state] = S
            M = torch.zeros_like(S) if i_transition < 0 else transition[i_transition]
            S = (M.mT if transposed else M) @ S
            S = S + (0 if i_written < 0 else written[i_written])
        if i_end >= 0:
            end[i_end] = S


def packed_operands(q, k, z, beta, A_log, dt_bias, borders, bound):
    """``prepare``, ``prep`` and ``inverse`` of packed documents: inputs [t, h, .] -> [chunks, h, 64, .]."""
    parts = []
    for a, e in pairwise(borders):
        qn, kn, g, s, rq, rk = prepare(q[a:e], k[a:e], z[a:e], A_log, dt_bias, bound)
        valid = (torch.arange(g.shape[1] * C, device=q.device) < e - a).view(1, -1, C)
        g = g * valid[..., None]
        bl = q.new_zeros(g.shape[1] * C, q.shape[1])
        bl[: e - a] = beta[a:e]
        rate = torch.sigmoid(bl.view(-1, C, q.shape[1]).permute(2, 0, 1))
        x = dict(prep(qn, kn, g, rate, bound), q=qn, k=kn, g=g, s=s, rq=rq, rk=rk, beta=rate)
        x["tb"] = inverse(x["akk"])
        parts.append({n: y.transpose(0, 1) for n, y in x.items()})
    return {n: torch.cat([p[n] for p in parts]) for n in parts[0]}


def to_chunks(x, borders):
    """[t, h, .] -> [chunks, h, 64, .], documents filled up with zeros."""
    parts = []
    for a, e in pairwise(borders):
        y = x.new_zeros(-(-(e - a) // C) * C, *x.shape[1:])
        y[: e - a] = x[a:e]
        parts.append(y.view(-1, C, *x.shape[1:]).transpose(1, 2))
    return torch.cat(parts)


def to_tokens(x, borders):
    """The inverse of ``to_chunks``."""
    parts, c = [], 0
    for a, e in pairwise(borders):
        n = -(-(e - a) // C)
        parts.append(x[c : c + n].transpose(1, 2).flatten(0, 1)[: e - a])
        c += n
    return torch.cat(parts)


class InTurn:
    """An exchange between shards that are computed one after the other, forward and then in reverse."""

    def __init__(self, state):
        self.state = state

    def entering(self, transition, written):
        before = torch.zeros_like(written) if self.state is None else self.state
        self.state = written if transition is None else written + transition @ before
        return before

    def leaving(self, transition, gradient):
        return self.entering(None if transition is None else transition.mT, gradient)


def run(q, k, v, z, beta, A_log, dt_bias, do, bound, S0=None, dST=None, cut=keep):
    """Every stage for one document; inputs [t, h, d] -> dict of stage outputs and of flattened gradients."""
    t, h, d = q.shape
    qn, kn, g, s, rq, rk = prepare(q, k, z, A_log, dt_bias, bound)

    def chunk(x):
        n = -(-t // C)
        return torch.cat([x, x.new_zeros(n * C - t, *x.shape[1:])]).view(n, C, h, -1).permute(2, 0, 1, 3)

    valid = (torch.arange(g.shape[1] * C, device=q.device) < t).view(1, -1, C)
    g = g * valid[..., None]
    rate = torch.sigmoid(chunk(beta[..., None])[..., 0])
    p = prep(qn, kn, g, rate, bound, cut)
    p["tb"] = cut(inverse(p["akk"]))
    zero = q.new_zeros(h, d, d)
    vc, oc = chunk(v), chunk(do)
    o, U, hs, ST = chain(p, p["tb"], vc, zero if S0 is None else S0, cut)
    o = cut(o)
    dv, dhs, dS0 = chain_backward(p, p["tb"], oc, zero if dST is None else dST, cut)
    sc = score(o, vc, rate, oc, U, dv, cut)
    dq, dk, dz = gradient(qn, kn, g, bound, oc, U, dv, hs, dhs, sc, rq, rk, s, A_log.exp(), cut)

    def flat(x):
        return x.permute(1, 2, 0, 3).reshape(-1, h, x.shape[-1])[:t]

    out = dict(
        p,
        o=flat(o),
        U=U,
        hs=hs,
        dhs=dhs,
        final=ST,
        dinitial=dS0,
        dv=flat(dv),
        **{n: x for n, x in sc.items() if n != "dbeta"},
    )
    out.update(dq=flat(dq), dk=flat(dk), dz=flat(dz), dbeta=flat(sc["dbeta"][..., None])[..., 0])
    zb = z + dt_bias.view(h, d)
    out["dA_log"] = (out["dz"] * zb).sum((0, 2))
    out["ddt_bias"] = out["dz"].sum(0).reshape(-1)
    return out


def recurrence(q, k, v, z, beta, A_log, dt_bias, bound, S=None):
    """The token recurrence, differentiable: [t, h, d] -> o, final state."""
    t, h, d = q.shape
    q = q * (q.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() * d**-0.5
    k = k * (k.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
    w = (bound * torch.sigmoid(A_log.exp()[:, None] * (z + dt_bias.view(h, d)))).exp()
    b = torch.sigmoid(beta)
    S = q.new_zeros(h, d, v.shape[-1]) if S is None else S
    o = []
    for i in range(t):
        S = S * w[i, :, :, None]
        u = b[i, :, None] * (v[i] - torch.einsum("hk,hkv->hv", k[i], S))
        S = S + k[i, :, :, None] * u[:, None]
        o.append(torch.einsum("hk,hkv->hv", q[i], S))
    return torch.stack(o), S
