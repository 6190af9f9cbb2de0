"""Orthogonalisation of many matrices at once by Newton-Schulz iteration.

The package emerging-optimizers has the same function with the same results (docs/optim.md), but there the
precision is a switch of the whole process, and where it is installed megatron-core imports Triton with it.
"""

from __future__ import annotations

from itertools import chain, cycle, islice, repeat

import torch
from torch import Tensor

from k3train.config.schema import NewtonSchulz

Triple = tuple[float, float, float]

COEFFICIENTS: dict[NewtonSchulz, tuple[Triple, ...]] = {
    # Keller Jordan's Muon (kellerjordan.github.io/posts/muon), Moonlight, Kimi K2
    NewtonSchulz.simple: ((3.4445, -4.7750, 2.0315),),
    # modded-nanogpt at 0674386, after leloykun.github.io/ponder/muon-opt-coeffs
    NewtonSchulz.quintic: (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # arXiv:2505.16932, algorithm 1, its safety factor 1.01 multiplied in
    NewtonSchulz.polar_express: (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
_EPS = 1e-7
"""Smallest Frobenius norm that is divided by: a gradient of zero stays zero."""


def orthogonalise(matrices: Tensor, kind: NewtonSchulz, steps: int, dtype: torch.dtype) -> Tensor:
    """Roughly U V' of each matrix U S V': [b, n, m] -> [b, n, m] in ``dtype``, in which products are taken.

    Singular values end between about 0.7 and 1.2 with ``simple`` and five steps, closer to 1 with the others;
    those below about 1e-3 of the Frobenius norm stay below.
    """
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (x / norm.clamp_min(_EPS)).to(dtype)
    triples = COEFFICIENTS[kind]
    after = repeat(triples[-1]) if kind is NewtonSchulz.polar_express else cycle(triples)
    for a, b, c in islice(chain(triples, after), steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x
