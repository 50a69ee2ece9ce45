"""TD weights by Fenchel duality: DualDICE with the target policy π̃ = cμ (the appendix on Fenchel duality)."""

from numpy.typing import ArrayLike

from marginax._checks import FloatArray
from marginax.trajectories import Trajectory
from marginax.weights._duality import Settings, estimate
from marginax.weights._model import EstimateInfo

__all__ = ["fenchel", "fenchel_states"]


def fenchel(
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
    r"""TD weights as the ψ of DualDICE's saddle point with target $\tilde{\pi} = cμ$, for every start $(x,a)$

    $$
    \min_v \max_ψ\ \mathbb{E}_{(x',a') \sim \hat d^μ_{x,a}}\left[\left(v(x',a') - γ\, \hat{\mathbb{E}}[v(x'',\tilde{\pi})]\right) ψ(x',a')
        - \tfrac12 ψ(x',a')^2\right] - (1-γ)\, v(x,a) .
    $$

    Visitations and expectations are those of the empirical MDP, that of `certainty_equivalence`: as tables, the two agree. The same
    solver as in `saddle_point`: primal-dual hybrid gradient with diagonal step sizes, averaging, restarts, and a stop on the gap.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        mu: the behaviour policy; when omitted, as logged; when not logged, action frequencies.
        discount: γ; read from the trajectories when omitted.
        prior: pseudo-counts, as for `certainty_equivalence`.
        start: a pair `(x, a)`: only its row.
        features: `[S, A, k]`: the weights of each start are linear in them. Tables when omitted.
        critic_features: `[S, A, k]` of the function v; the same as `features` when omitted.
        radius: v's coefficients are bounded by it, divided by `1-γ`. Only with features.
        tolerance: the duality gap at which to stop, in units of the loss (which has a factor `1-γ`).
        max_iterations: after which a warning says that the gap is larger still.
        return_info: whether to return an `EstimateInfo` too: iterations, gap, and where μ came from.

    Returns:
        `w` of shape `[S, A, S, A]`, or `[S, A]` for one start; with `return_info`, that and the info.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> fenchel(batch, mx.traces.retrace(pi, mu), start=(0, 0)).round(2)
    array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]])
    """
    settings = Settings(
        mu, discount, prior, start, features, critic_features, radius, tolerance, max_iterations, return_info
    )
    return estimate(trajectories, c, settings, quadratic=True, on_states=False)


def fenchel_states(
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
    r"""TD weights on states for V-trace: as `fenchel`, with $ψ(x')$, $v(x')$ and the kernel $\sum_a c(x,a)\, μ(a|x)\, \hat p(x'|x,a)$.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        mu: the behaviour policy; when omitted, as logged; when not logged, action frequencies.
        discount: γ; read from the trajectories when omitted.
        prior: pseudo-counts, as for `certainty_equivalence`.
        start: a state: only its row.
        features: `[S, k]`: the weights of each start are linear in them. Tables when omitted.
        critic_features: `[S, k]` of the function v; the same as `features` when omitted.
        radius: v's coefficients are bounded by it, divided by `1-γ`. Only with features.
        tolerance: the duality gap at which to stop, in units of the loss (which has a factor `1-γ`).
        max_iterations: after which a warning says that the gap is larger still.
        return_info: whether to return an `EstimateInfo` too: iterations, gap, and where μ came from.

    Returns:
        `w` of shape `[S, S]`, or `[S]` for one start; with `return_info`, that and the info.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> fenchel_states(batch, mx.traces.retrace(pi, mu), start=0).round(2)
    array([1.  , 0.5 , 0.25])
    """
    settings = Settings(
        mu, discount, prior, start, features, critic_features, radius, tolerance, max_iterations, return_info
    )
    return estimate(trajectories, c, settings, quadratic=True, on_states=True)
