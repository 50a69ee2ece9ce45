"""What the explorer shows, as exact numbers: weights, rates, values, and the variance of a sampled target."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marginax import _checks as checks
from marginax import operators, problems, traces, weights
from marginax._checks import FloatArray
from marginax._solve import Resolvent
from marginax.mdp import TabularMDP

PROBLEMS = ("chain", "open-world", "frozen-lake", "garnet")
_LARGEST = 400  # states: one move stays below 0.3 s
CLIPS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 1.9, 2.0, 3.0, 5.0, 10.0)
CAPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True)
class World:
    """A problem and how its states are laid out on the screen.

    Attributes:
        title: its name.
        mdp: the MDP.
        pi: target policy `[S, A]`.
        mu: behaviour policy `[S, A]`.
        columns: states in one row of the map.
        actions: a name for each action.
        own_discount: whether γ comes with the problem, from its file.
    """

    title: str
    mdp: TabularMDP
    pi: FloatArray
    mu: FloatArray
    columns: int
    actions: tuple[str, ...]
    own_discount: bool = False


@dataclass(frozen=True)
class Setting:
    """What the person has chosen.

    Attributes:
        towards: how far π is turned towards μ: 0 leaves π, 1 is μ.
        decay: λ.
        clip: c̄.
        state: the start state.
        action: the start action.
    """

    towards: float = 0.0
    decay: float = 1.0
    clip: float = 1.0
    state: int = 0
    action: int = 0


@dataclass(frozen=True)
class Picture:
    """Everything that one setting shows.

    Attributes:
        weights: TD weights of the traces from the start pair, averaged over the actions at each state by how often μ
            takes them, `[S]`.
        credit: `Σ_a D(x,a)`, how much Bellman errors at each state count for the start pair, `[S]`.
        values: V of the turned policy, `[S]`.
        rates: local contraction rate of each state, the largest over its actions, `[S]`.
        operators: rate over all pairs, local rate at the start, and the target's standard deviation, by operator.
        value: Q of the turned policy at the start pair, the fixed point of every operator.
    """

    weights: FloatArray
    credit: FloatArray
    values: FloatArray
    rates: FloatArray
    operators: dict[str, tuple[float, float, float]]
    value: float


@dataclass(frozen=True)
class Frontier:
    """Local rate and standard deviation of the target at the start pair, along three curves.

    Attributes:
        retrace: Retrace at each clip of `CLIPS`, `[K, 2]`.
        marginalized: the same traces with their marginalized weights, `[K, 2]`.
        fastest: the weights that contract fastest under each cap of `CAPS`, `[L, 2]`.
    """

    retrace: FloatArray
    marginalized: FloatArray
    fastest: FloatArray


def world(name: str, size: int = 10, seed: int = 0, discount: float = 0.99) -> World:
    """A problem by name, or from an `.npz` file.

    Args:
        name: one of `PROBLEMS`, or the path of a file with arrays `p[S,A,S]`, `r[S,A]`, `pi[S,A]`, `mu[S,A]`, and
            optionally `discount` and `columns`.
        size: length of the chain, side of the Open World, number of a garnet's states.
        seed: of the garnet.
        discount: γ, unless the file has its own.

    >>> world("open-world", size=4).mdp.num_states
    16
    """
    if name == "chain":
        mdp, pi, mu = problems.chain(n=size, discount=discount)
        return World(f"chain of {size}", mdp, pi, mu, size, _numbered(mdp.num_actions))
    if name == "open-world":
        mdp, pi, mu = problems.open_world(n=size, discount=discount, sparse=False)
        return World(f"Open World, {size} × {size}", mdp, pi, mu, size, ("left", "up", "right", "down"))
    if name == "garnet":
        mdp, pi, mu = problems.garnet(size, 3, 3, seed=seed, discount=discount, termination=0.02)
        columns = int(np.ceil(np.sqrt(size)))
        return World(f"garnet with {size} states", mdp, pi, mu, columns, _numbered(3))
    if name == "frozen-lake":
        mdp = problems.from_gymnasium("FrozenLake-v1", discount=discount)
        best = mdp.greedy_policy(mdp.optimal_values())
        uniform = np.full_like(best, 1 / mdp.num_actions)
        columns = int(np.sqrt(mdp.num_states))
        pi = 0.9 * best + 0.1 * uniform
        return World("FrozenLake", mdp, pi, uniform, columns, ("left", "down", "right", "up"))
    path = Path(name)
    if path.suffix != ".npz":
        raise ValueError(
            f"unknown problem {name!r}: choose {', '.join(PROBLEMS)} or the path of an .npz file"
        )
    return _from_file(path, discount)


def _from_file(path: Path, discount: float) -> World:
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ValueError(f"cannot read the problem {str(path)!r}: it is not a file that numpy.savez wrote")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read the problem {str(path)!r}: {error}") from None
    missing = [key for key in ("p", "r", "pi", "mu") if key not in arrays]
    if missing:
        raise ValueError(f"{str(path)!r} has no array {missing[0]!r}: it needs p, r, pi and mu")
    gamma = checks.number("discount", arrays.get("discount", discount))
    mdp = TabularMDP(arrays["p"], arrays["r"], gamma)
    if mdp.num_states > _LARGEST:
        raise ValueError(f"{str(path)!r} has {mdp.num_states} states: the explorer shows at most {_LARGEST}")
    pi, mu = mdp.policy("pi", arrays["pi"]), mdp.policy("mu", arrays["mu"])
    default = int(np.ceil(np.sqrt(mdp.num_states)))
    columns = checks.count("columns", checks.number("columns", arrays.get("columns", default)))
    if columns > mdp.num_states:
        raise ValueError(f"columns must be at most the number of states {mdp.num_states}, got {columns}")
    return World(
        path.name,
        mdp,
        pi,
        mu,
        columns,
        _numbered(mdp.num_actions),
        own_discount="discount" in arrays,
    )


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"action {a}" for a in range(count))


def policy(here: World, setting: Setting) -> FloatArray:
    """The target policy, turned towards μ: `(1-β) π + β μ`."""
    return (1 - setting.towards) * here.pi + setting.towards * here.mu


def look(here: World, setting: Setting) -> Picture:
    """All that one setting shows, exactly.

    The standard deviation is that of the target at the start pair from one trajectory of μ, with Q = 0.

    >>> picture = look(world("open-world", size=4), Setting(action=2))
    >>> {name: round(rate, 3) for name, (_, rate, _) in picture.operators.items()}
    {'one-step': 0.99, 'tree backup': 0.986, 'Retrace': 0.966, 'marginalized': 0.966}
    """
    mdp, mu, start = here.mdp, here.mu, (setting.state, setting.action)
    pi = policy(here, setting)
    c = traces.retrace(pi, mu, clip=setting.clip, decay=setting.decay)
    retrace = operators.multi_step(mdp, pi, mu, c)
    row = weights.exact(mdp, mu, c, start=start)
    visits = mdp.credit_row(mu, start)
    credit = row * visits
    at_state = visits.sum(axis=1)
    table = {}
    for name, coefficients in (
        ("one-step", np.zeros_like(c)),
        ("tree backup", traces.tree_backup(pi, mu, decay=setting.decay)),
        ("Retrace", c),
    ):
        operator = operators.multi_step(mdp, pi, mu, coefficients)
        table[name] = (
            float(operator.contraction_rate()),
            float(operator.contraction_rates()[start]),
            _deviation(mdp, mu, start, c=coefficients),
        )
    table["marginalized"] = (*table["Retrace"][:2], _deviation(mdp, mu, start, w=row))
    return Picture(
        weights=np.divide(credit.sum(axis=1), at_state, out=np.zeros_like(at_state), where=at_state > 0),
        credit=credit.sum(axis=1),
        values=mdp.v_values(pi),
        rates=retrace.contraction_rates().max(axis=1),
        operators=table,
        value=float(mdp.q_values(pi)[start]),
    )


def frontier(here: World, setting: Setting) -> Frontier:
    """Rate against deviation at the start pair: Retrace and marginalized over the clip, and the fastest weights over the cap."""
    mdp, mu, start = here.mdp, here.mu, (setting.state, setting.action)
    pi = policy(here, setting)
    retrace, marginalized = [], []
    for clip in CLIPS:
        c = traces.retrace(pi, mu, clip=clip, decay=setting.decay)
        row = weights.exact(mdp, mu, c, start=start)
        rate = float(operators.multi_step(mdp, pi, mu, c).contraction_rates()[start])
        retrace.append((rate, _deviation(mdp, mu, start, c=c)))
        marginalized.append((rate, _deviation(mdp, mu, start, w=row)))
    fastest = [
        (_local_rate(mdp, pi, mu, row, start), _deviation(mdp, mu, start, w=row))
        for row in fastest_rows(mdp, pi, mu, start, CAPS)
    ]
    return Frontier(np.array(retrace), np.array(marginalized), np.array(fastest))


def fastest_rows(
    mdp: TabularMDP, pi: FloatArray, mu: FloatArray, start: tuple[int, int], caps: Sequence[float]
) -> FloatArray:
    """The weights of `linear_programs.fastest` for one start pair under many caps, `[K, S, A]`, by iteration.

    The optimal credit is the flow of π cut off at the cap, `D = min(w̄ D^μ, δ + γ (P^π)ᵀ D)`. The iteration from zero
    rises to it. A linear program for each cap would take seconds.
    """
    visits = mdp.credit_row(mu, start)
    most = np.asarray(caps)[:, None, None] * visits
    p = mdp.dense_p().reshape(-1, mdp.num_states)
    credit = np.zeros_like(most)
    while True:
        flow = mdp.discount * (credit.reshape(len(most), -1) @ p)
        flow = flow[:, :, None] * pi
        flow[(slice(None), *start)] += 1.0
        longer = np.minimum(most, flow)
        change, credit = abs(longer - credit).max(), longer
        if change < 1e-9:
            return np.divide(credit, visits, out=np.zeros_like(credit), where=visits > 0)


def _local_rate(
    mdp: TabularMDP, pi: FloatArray, mu: FloatArray, row: FloatArray, start: tuple[int, int]
) -> float:
    """`‖δ + γ (P^π)ᵀ D - D‖₁` for the credit `D = w ∘ (I - γ P^μ)^{-1}` of one start pair."""
    credit = row * mdp.credit_row(mu, start)
    flow = np.tensordot(credit, mdp.dense_p(), axes=2)
    residual = mdp.discount * flow[:, None] * pi - credit
    residual[start] += 1.0
    return float(abs(residual).sum())


def _deviation(
    mdp: TabularMDP,
    mu: FloatArray,
    start: tuple[int, int],
    *,
    c: FloatArray | float = 1.0,
    w: FloatArray | float = 1.0,
) -> float:
    """Standard deviation of `Σ_t γ^t c_1…c_t w(x_t,a_t) r_t` from the start pair under μ: two linear systems on states.

    With `F = w r + γ c' F'`, the moments are `m = w r + γ P^{cμ} m` and `s = w² E[r²] + 2 γ w r P^{cμ} m + γ² P^{c²μ} s`.
    """
    gamma, weighted = mdp.discount, w * mdp.r
    first = _solve(mdp, gamma, mu * c, weighted)
    square = w**2 * (mdp.r**2 + mdp.reward_std**2) + 2 * weighted * (first - weighted)
    second = _solve(mdp, gamma**2, mu * c**2, square)
    return float(np.sqrt(max(second[start] - first[start] ** 2, 0.0)))


def _solve(mdp: TabularMDP, factor: float, measure: FloatArray, known: FloatArray) -> FloatArray:
    """Solves `f = known + factor P^m f` on states; infinite where the sum does not converge."""
    paths = Resolvent(mdp.state_kernel(measure), factor)
    if not paths.converges:
        return np.full_like(known, np.inf)
    return known + factor * mdp.expect_next(paths((measure * known).sum(axis=1)))


def learning_curves(
    here: World, setting: Setting, *, seeds: int = 10, chunk: int = 10, chunks: int = 12
) -> Iterator[dict[str, FloatArray]]:
    """Error of Q against trajectories for one-step, Retrace and marginalized, as they learn.

    Each operator learns from the same trajectories of μ, ten seeds side by side, from Q = 0 with a step size of 0.1.
    The error is `‖Q - Q^π‖ / ‖Q^π‖`. The marginalized operator has the exact weights of the same traces.

    Yields:
        For each operator the errors so far, `[seeds, iterations]`; once after each chunk of trajectories.
    """
    import jax

    from marginax import learning, trajectories

    mdp, mu, pi = here.mdp, here.mu, policy(here, setting)
    c = traces.retrace(pi, mu, clip=setting.clip, decay=setting.decay)
    exact = weights.exact(mdp, mu, c)
    truth = mdp.q_values(pi)
    scale = max(float(np.sqrt((truth**2).mean())), 1e-12)
    tables = trajectories.sampling_tables(mdp)
    draw = jax.vmap(lambda key: trajectories.sample(tables, mu, key, episodes=chunk, horizon=200))
    plans = {"one-step": (0 * c, None), "Retrace": (c, None), "marginalized": (c, exact)}
    q = {name: np.zeros((seeds, *pi.shape), np.float32) for name in plans}
    errors: dict[str, list[FloatArray]] = {name: [] for name in plans}
    for k in range(chunks):
        stream = draw(jax.random.split(jax.random.key(k), seeds))
        for name, (coefficients, estimator) in plans.items():
            learn = jax.vmap(
                lambda episodes, initial, c=coefficients, estimator=estimator: learning.evaluate(
                    episodes, pi, c, estimator, initial=initial, visits="mean"
                )
            )
            found = np.asarray(learn(stream, q[name]))
            q[name] = found[:, -1]
            errors[name].append(np.sqrt(((found - truth) ** 2).mean(axis=(2, 3))) / scale)
        yield {name: np.concatenate(parts, axis=1) for name, parts in errors.items()}
