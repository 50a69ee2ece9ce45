"""TD weights as the saddle point of the paper's loss, min over w and max over q (Section 5)."""

from numpy.typing import ArrayLike

from marginax._checks import FloatArray
from marginax.trajectories import Trajectory
from marginax.weights._duality import Settings, estimate
from marginax.weights._model import EstimateInfo

__all__ = ["saddle_point", "saddle_point_states"]


def saddle_point(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    mu: ArrayLike | None = None,
    discount: float | None = None,
    prior: ArrayLike | float = 0.0,
    start: tuple[int, int] | None = None,
    features: ArrayLike | None = None,
    critic_features: ArrayLike | None = None,
    radius: float = 100.0,
    tolerance: float = 1e-7,
    max_iterations: int = 50_000,
    return_info: bool = False,
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    r"""TD weights by $\min_w \max_{|q| \le 1} L(q, w)$ with the empirical loss (Section 5), for every start $(x,a)$

    $$
    L(q, w) = (1-γ)\, q(x,a) + \mathbb{E}_{(x',a') \sim \hat d^μ_{x,a}}\left[w(x',a') \left(γ\, \hat{\mathbb{E}}[q(x'',\tilde{\pi})]
        - q(x',a')\right)\right], \qquad \tilde{\pi} = cμ .
    $$

    Visitations and expectations are those of the empirical MDP, that of `certainty_equivalence`: as tables, the two agree. The critic
    lives on the hypercube, so the maximum is the $L^1$ norm of the balance equation's residual. Solved by the primal-dual hybrid
    gradient with diagonal step sizes, averaging and restarts, until the duality gap is at most `tolerance`.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        mu: the behaviour policy; when omitted, as logged; when not logged, action frequencies.
        discount: γ; read from the trajectories when omitted.
        prior: pseudo-counts, as for `certainty_equivalence`.
        start: a pair `(x, a)`: only its row.
        features: `[S, A, k]`: the weights of each start are linear in them. Tables when omitted.
        critic_features: `[S, A, k]` of the critic; the same as `features` when omitted.
        radius: a bound on the root mean square of the weights (each coordinate of it). Only with features.
        tolerance: the duality gap at which to stop, in units of the loss (which has a factor `1-γ`).
        max_iterations: after which a warning says that the gap is larger still.
        return_info: whether to return an `EstimateInfo` too: iterations, gap, and where μ came from.

    Returns:
        `w` of shape `[S, A, S, A]`, or `[S, A]` for one start; with `return_info`, that and the info.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> saddle_point(batch, mx.traces.retrace(pi, mu), start=(0, 0)).round(2)
    array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]])
    """
    settings = Settings(
        mu, discount, prior, start, features, critic_features, radius, tolerance, max_iterations, return_info
    )
    return estimate(trajectories, c, settings, quadratic=False, on_states=False)


def saddle_point_states(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    mu: ArrayLike | None = None,
    discount: float | None = None,
    prior: ArrayLike | float = 0.0,
    start: int | None = None,
    features: ArrayLike | None = None,
    critic_features: ArrayLike | None = None,
    radius: float = 100.0,
    tolerance: float = 1e-7,
    max_iterations: int = 50_000,
    return_info: bool = False,
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    r"""TD weights on states for V-trace: as `saddle_point`, with $w(x')$, $q(x')$ and the kernel $\sum_a c(x,a)\, μ(a|x)\, \hat p(x'|x,a)$.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        mu: the behaviour policy; when omitted, as logged; when not logged, action frequencies.
        discount: γ; read from the trajectories when omitted.
        prior: pseudo-counts, as for `certainty_equivalence`.
        start: a state: only its row.
        features: `[S, k]`: the weights of each start are linear in them. Tables when omitted.
        critic_features: `[S, k]` of the critic; the same as `features` when omitted.
        radius: a bound on the root mean square of the weights (each coordinate of it). Only with features.
        tolerance: the duality gap at which to stop, in units of the loss (which has a factor `1-γ`).
        max_iterations: after which a warning says that the gap is larger still.
        return_info: whether to return an `EstimateInfo` too: iterations, gap, and where μ came from.

    Returns:
        `w` of shape `[S, S]`, or `[S]` for one start; with `return_info`, that and the info.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> saddle_point_states(batch, mx.traces.retrace(pi, mu), start=0).round(2)
    array([1.  , 0.5 , 0.25])
    """
    settings = Settings(
        mu, discount, prior, start, features, critic_features, radius, tolerance, max_iterations, return_info
    )
    return estimate(trajectories, c, settings, quadratic=False, on_states=True)
