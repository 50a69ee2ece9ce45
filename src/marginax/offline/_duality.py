"""Marginalized importance sampling by its two saddle points, on the counts of a log, without factorising anything.

With b = starts ⊗ π, A = I - γ P̂^π on the pairs of the log, and D the visits per episode, the loss of Section 5
for the start distribution is L(w, q) = b·q - w·D A q.

- saddle point: min_w max_{‖q‖₂ ≤ 1} L(w, q) = min_w ‖b - Aᵀ D w‖₂, by LSMR on the occupancy D w;
- Fenchel (DualDICE): min_ν ½ ‖A ν‖²_D - b·ν with w = A ν, by conjugate gradients on its normal equations.

With tables both meet the balance equation that certainty equivalence solves directly. The flow they leave
unexplained, times the values, is what the estimate can still be wrong by; it is added to the interval.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import LinearOperator, cg, lsmr

from marginax.offline._counts import Counts
from marginax.offline._model import Model

PAIR_LIMIT = 20_000
TOLERANCE = 1e-9


def solve_weights(
    counts: Counts, model: Model, pi: np.ndarray, discount: float, method: str
) -> tuple[np.ndarray, float]:
    """Weights [S, A] by `saddle-point` or `fenchel`, and the largest error in value that they leave.

    Args:
        counts: of the log.
        model: certainty equivalence, for the support and the values that turn a residual into an error.
        pi: [S, A] target policy.
        discount: γ.
        method: which of the two.
    """
    s, a = pi.shape
    pairs = np.flatnonzero(model.support.ravel())
    visits = counts.visits.sum(axis=0).ravel()[pairs]
    p = sp.diags_array(1.0 / visits) @ counts.transitions()[pairs]  # [m, S]
    spread = sp.csr_array(
        (pi.ravel()[pairs], (pairs // a, np.arange(len(pairs)))), shape=(s, len(pairs))
    )  # state -> its pairs
    system = (sp.eye_array(len(pairs)) - discount * (p @ spread)).tocsr()
    flow_back = system.T.tocsr()
    starts = counts.starts.sum(axis=0)
    b = (starts / starts.sum())[pairs // a] * pi.ravel()[pairs]
    per_episode = visits / counts.episodes
    if method == "saddle-point":
        occupancy = lsmr(flow_back, b, atol=TOLERANCE, btol=TOLERANCE, maxiter=20 * len(pairs))[0]
    else:
        # In units where D is the identity: A' = D^½ A D^-½ has the conditioning of A.
        root = np.sqrt(per_episode)
        normal = LinearOperator(
            (len(pairs), len(pairs)),
            matvec=lambda x: (flow_back @ (per_episode * (system @ (x / root)))) / root,
            dtype=np.float64,
        )
        nu = cg(normal, b / root, rtol=TOLERANCE, atol=0.0, maxiter=20 * len(pairs))[0] / root
        occupancy = per_episode * (system @ nu)
    residual = b - flow_back @ occupancy
    weights = np.zeros(s * a)
    weights[pairs] = occupancy / per_episode
    return weights.reshape(s, a), float(np.abs(residual) @ np.abs(model.q.ravel()[pairs]))
