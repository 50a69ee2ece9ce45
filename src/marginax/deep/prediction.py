r"""Policy evaluation with networks: many operators learn $Q^\pi$ from the same replayed sequences, in one program.

The policies are fixed, so the data do not depend on what is learned: all settings of a seed share one buffer and the same
batches. Learning proceeds in *phases*. Each begins with fresh trajectories of the behaviour policy and a new target
network. Both are kept for the whole phase, so the target network is evaluated once for every state of the buffer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from marginax import _checks as checks
from marginax.deep import path_network
from marginax.deep.games import (
    Game,
    Network,
    Policy,
    Sequences,
    Truth,
    actions_of,
    epsilon_greedy,
    patches,
    rollout,
)
from marginax.deep.path_network import PathLoss, PathNetwork, Paths
from marginax.deep.run_config import Sizes
from marginax.traces import clip_ratios

OPERATORS = ("one-step", "retrace", "tree-backup", "q-lambda", "peng", "vtrace", "marginalized")


@dataclasses.dataclass(frozen=True)
class Setting:
    """An operator with its decay λ and clip c̄ (infinite where the operator has none).

    >>> Setting("retrace", 0.9, 2.0)
    Setting(operator='retrace', decay=0.9, clip=2.0)
    """

    operator: str
    decay: float = 1.0
    clip: float = np.inf


class Coefficients(NamedTuple):
    """The settings as arrays with one entry per setting, with which one formula covers all operators.

    Attributes:
        decay: λ.
        clip: c̄.
        by_ratio: Whether traces are clipped ratios.
        by_pi: Whether traces are target probabilities (tree backup). Traces are constant if neither holds.
        on_states: Whether errors subtract V (Peng's Q(λ), V-trace) instead of Q.
        late: Whether the last factor of a product is the clipped ratio without λ (V-trace's ρ).
        weighted: Whether the credit is $λ^t u c$ (marginalized).
    """

    decay: Any
    clip: Any
    by_ratio: Any
    by_pi: Any
    on_states: Any
    late: Any
    weighted: Any


def coefficients(settings: Sequence[Setting]) -> Coefficients:
    """The settings as arrays.

    Raises:
        ValueError: There is no setting, an operator is unknown, λ is outside [0, 1] or c̄ is not positive.

    >>> coefficients([Setting("peng", 0.9)]).decay
    array([0.9], dtype=float32)
    """
    if not settings:
        raise ValueError("settings must not be empty")
    for k, each in enumerate(settings):
        if not isinstance(each, Setting):
            raise ValueError(f"settings[{k}] must be a Setting, got {each!r}")
        checks.choice(f"settings[{k}].operator", each.operator, OPERATORS)
        checks.fraction(f"settings[{k}].decay", each.decay)
        checks.positive(f"settings[{k}].clip", each.clip, infinite=True)

    def flags(*operators: str) -> np.ndarray:
        return np.array([each.operator in operators for each in settings])

    return Coefficients(
        np.array([0.0 if s.operator == "one-step" else s.decay for s in settings], np.float32),
        np.array([s.clip for s in settings], np.float32),
        flags("retrace", "vtrace", "marginalized"),
        flags("tree-backup"),
        flags("peng", "vtrace"),
        flags("vtrace"),
        flags("marginalized"),
    )


def credit(one: Coefficients, pi: Array, mu: Array, u: Array) -> Float[Array, "T"]:
    """The credit $D_t$ of the Bellman error at each step for the first pair of a sequence, without the discount.

    Args:
        one: One setting.
        pi: Target probabilities of the actions taken, `[T]`.
        mu: Behaviour probabilities of the actions taken, `[T]`.
        u: Mean products of clipped ratios on the way to each step, `[T]`; read only by `marginalized`.

    >>> one = jax.tree.map(lambda x: x[0], coefficients([Setting("retrace", 0.9, 1.0)]))
    >>> found = credit(one, jnp.array([1.0, 0.5, 0.25]), jnp.array([1.0, 0.5, 0.5]), jnp.ones(3))
    >>> [round(float(x), 3) for x in found]
    [1.0, 0.9, 0.405]
    """
    ratio = clip_ratios(pi / mu, one.clip)
    trace = one.decay * jnp.where(one.by_ratio, ratio, jnp.where(one.by_pi, pi, 1.0))
    products = jnp.cumprod(trace.at[0].set(1.0))
    before = jnp.concatenate([jnp.ones(1), products[:-1]])
    marginal = path_network.credit(u, ratio, one.decay)
    return jnp.where(one.weighted, marginal, jnp.where(one.late, before * ratio, products)).at[0].set(1.0)


def first_target(
    one: Coefficients, credits: Array, q: Array, v: Array, rewards: Array, discounts: Array
) -> Float[Array, ""]:
    r"""The operator's target for the first pair of a sequence.

    $$r_0 + \gamma V(x_1) + \sum_{t \ge 1} \gamma^t D_t \bigl(r_t + \gamma V(x_{t+1}) - Q(x_t,a_t)\bigr)$$

    with $V(x_t)$ in the place of $Q(x_t,a_t)$ for Peng's Q(λ) and V-trace.

    Args:
        one: One setting.
        credits: $D_t$.
        q: $Q(x_t, a_t)$, `[T]`.
        v: $V(x_t) = Q(x_t, π)$, `[T+1]`.
        rewards: $r_t$.
        discounts: γ, or 0 where step t ended the episode.

    >>> one = jax.tree.map(lambda x: x[0], coefficients([Setting("peng", 1.0)]))
    >>> two = jnp.ones(2)
    >>> first_target(one, two, two, jnp.ones(3), two, 0.5 * two)
    Array(1.75, dtype=float32)
    """
    errors = rewards + discounts * v[1:] - jnp.where(one.on_states, v[:-1], q)
    powers = jnp.cumprod(discounts)[:-1]
    return rewards[0] + discounts[0] * v[1] + jnp.sum(powers * credits[1:] * errors[1:])


class Agents(NamedTuple):
    """Everything that learning changes, for all settings of one seed.

    Attributes:
        q: The Q-networks, with a leading axis of settings.
        q_optimiser: Adam's states for them.
        u: The networks of u, with a leading axis of clips; None if no setting is `marginalized`.
        states: The states and observations of the simulators.
    """

    q: Network
    q_optimiser: Any
    u: Paths | None
    states: Any


class Evaluation(NamedTuple):
    """The measurements of one phase. Those of a setting that diverged are not finite.

    Attributes:
        errors: RMSE of Q on the held-out pairs, divided by the standard deviation of their true values,
            `[reports, settings]`. The mean squared standard error of the true values is subtracted from the squared error.
        variances: Variance of targets given the pair, divided by the variance of the true values, `[settings]`.
        credits: Mean of $Σ_t γ^t D_t$, `[settings]`.
        weights: Mean and largest u at steps t ≥ 2, `[clips, 2]`.
    """

    errors: Array
    variances: Array
    credits: Array
    weights: Array


def program(
    game: Game,
    settings: Sequence[Setting],
    loss: PathLoss,
    *,
    discount: float,
    sizes: Sizes,
) -> tuple[Callable, Callable]:
    """Two pure functions for one seed: `init(mu, key)` makes agents, and `phase(pi, mu, truth, agents, key)` trains them.

    Args:
        game: The game.
        settings: The operators.
        loss: How u is learned, by one network for each clip of `marginalized`.
        discount: γ.
        sizes: Sizes of data, networks and measurements.
    """
    check(settings, sizes)
    built = _Program(game, settings, loss, discount, sizes)
    return built.init, built.phase


class _Program:
    """The two functions of `program` and their steps."""

    def __init__(
        self, game: Game, settings: Sequence[Setting], loss: PathLoss, discount: float, sizes: Sizes
    ) -> None:
        self.game, self.loss, self.discount, self.sizes = game, loss, discount, sizes
        self.actions = actions_of(game)
        self.count, self.settings = len(settings), coefficients(settings)
        # Settings of `marginalized` with the same clip share a network of u; the other settings do not read it.
        self.clips = sorted({s.clip for s in settings if s.operator == "marginalized"})
        self.network_of = np.array(
            [self.clips.index(s.clip) if s.operator == "marginalized" else 0 for s in settings]
        )
        rate = sizes.learning_rate
        self.adam = optax.adam(optax.linear_schedule(rate, sizes.last_rate * rate, sizes.updates))

    def init(self, mu: Policy, key: Array) -> Agents:
        """Fresh agents, and simulators after `burn_in` steps of the behaviour policy."""
        sizes, game = self.sizes, self.game
        q_key, u_key, reset_key, burn_key = jax.random.split(key, 4)
        # All settings of a seed start from the same network, so that only the operator differs.
        q = _copies(self._network(self.actions, q_key), self.count)
        u = _copies(self._fresh_u(u_key), len(self.clips)) if self.clips else None
        states = jax.vmap(game.reset)(jax.random.split(reset_key, sizes.environments))

        def burn(states: Any, key: Array) -> tuple[Any, None]:
            return rollout(game, mu, mu, states, key, 1)[0], None

        states, _ = jax.lax.scan(burn, states, jax.random.split(burn_key, sizes.burn_in))
        return Agents(q, jax.vmap(self.adam.init)(q), u, states)

    def phase(
        self, pi: Policy, mu: Policy, true: Truth | None, agents: Agents, key: Array
    ) -> tuple[Agents, Evaluation | None]:
        """Fresh trajectories, `period` updates with the present Q as target network, and measurements against `true`."""
        sizes = self.sizes
        play_key, draw_key = jax.random.split(key)
        states, data = rollout(self.game, pi, mu, agents.states, play_key, sizes.steps)
        update = partial(self._update, data, *self._look_up(agents.q, data))

        def between_reports(agents: Agents, keys: Array) -> tuple[Agents, Array]:
            agents, _ = jax.lax.scan(update, agents, keys)
            if true is None:
                return agents, jnp.zeros(0)
            return agents, jax.vmap(_relative_error, (0, None))(agents.q, true)

        keys = jax.random.split(draw_key, (sizes.reports, sizes.period // sizes.reports))
        agents, errors = jax.lax.scan(between_reports, agents._replace(states=states), keys)
        return agents, None if true is None else Evaluation(errors, *self._probe(agents, true))

    def _update(
        self, data: Sequences, q_table: Array, v_table: Array, agents: Agents, key: Array
    ) -> tuple[Agents, None]:
        """One update of all networks on one batch, with the target network's values looked up in the tables."""
        sizes = self.sizes
        copy_key, start_key = jax.random.split(key)
        copies = jax.random.randint(copy_key, (sizes.batch, 1), 0, sizes.environments)
        starts = jax.random.randint(start_key, (sizes.batch, 1), 0, sizes.steps - sizes.length + 1)
        states = starts + jnp.arange(sizes.length + 1)  # T + 1 states around T steps
        steps = states[:, :-1]
        batch = Sequences(
            observations=data.observations[copies, states],
            actions=data.actions[copies, steps],
            rewards=data.rewards[copies, steps],
            ended=data.ended[copies, steps],
            pi=data.pi[copies, states],
            mu=data.mu[copies, steps],
        )
        q, v = q_table[:, copies, steps], v_table[:, copies, states]
        paths, u = (None, None) if agents.u is None else self._learn_u(agents.u, batch)
        targets = self._targets(self._credits(batch, u), q, v, batch)
        inputs = patches(batch.observations[:, 0].astype(jnp.float32))

        def squared_error(network: Network, target: Array) -> Array:
            value = jnp.take_along_axis(network(inputs), batch.actions[:, :1], 1)[:, 0]
            return jnp.mean((value - target) ** 2)

        gradients = jax.vmap(jax.grad(squared_error))(agents.q, targets)
        moves, q_optimiser = jax.vmap(self.adam.update)(gradients, agents.q_optimiser)
        return Agents(optax.apply_updates(agents.q, moves), q_optimiser, paths, agents.states), None

    def _probe(self, agents: Agents, true: Truth) -> tuple[Array, Array, Array]:
        """`variances`, `credits` and `weights` of an `Evaluation`, from the sequences that start at held-out pairs."""
        sizes = self.sizes
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), true.probes)
        q, v = self._look_up(agents.q, data)
        u = None
        if agents.u is not None:
            scores = jax.vmap(partial(self._log_u, data=data))(agents.u.average)
            u = jax.vmap(path_network.mean_products)(scores, jnp.asarray(self.clips))
        credits = self._credits(data, u)
        targets = self._targets(credits, q, v, data).reshape(self.count, sizes.probes, sizes.repeats)
        discounts = self._discounts(data)
        powers = jnp.concatenate([jnp.ones((len(discounts), 1)), jnp.cumprod(discounts, 1)[:, :-1]], 1)
        variances = targets.var(-1, ddof=1).mean(-1) / true.values.var()
        later_u = jnp.zeros((0, 1, 1)) if u is None else u[..., 2:]
        mean_and_largest_u = jnp.stack([later_u.mean((1, 2)), later_u.max((1, 2))], -1)
        return variances, jnp.mean(jnp.sum(powers * credits, -1), -1), mean_and_largest_u

    def _look_up(self, networks: Network, data: Sequences) -> tuple[Array, Array]:
        """Q(x_t, a_t) `[settings, copies, T]` and V(x_t) `[settings, copies, T+1]` of all settings."""

        def at_one_time(states: tuple[Array, Array]) -> tuple[Array, Array]:
            observations, pi = states
            q = jax.vmap(lambda network: network(patches(observations.astype(jnp.float32))))(networks)
            return q, jnp.sum(q * pi, -1)

        q, v = jax.lax.map(at_one_time, (jnp.moveaxis(data.observations, 1, 0), jnp.moveaxis(data.pi, 1, 0)))
        q, v = jnp.moveaxis(q, 0, 2), jnp.moveaxis(v, 0, 2)
        return jnp.take_along_axis(q[:, :, :-1], data.actions[None, ..., None], -1)[..., 0], v

    def _credits(self, data: Sequences, u: Array | None) -> Array:
        """The credits of all settings, `[settings, batch, T]`."""
        each_u = jnp.ones((self.count, *data.mu.shape)) if u is None else u[self.network_of]
        per_sequence = jax.vmap(credit, (None, 0, 0, 0))
        return jax.vmap(per_sequence, (0, None, None, 0))(self.settings, _pi_taken(data), data.mu, each_u)

    def _targets(self, credits: Array, q: Array, v: Array, data: Sequences) -> Array:
        """The targets of the first pairs, `[settings, batch]`."""
        per_sequence = jax.vmap(first_target, (None, 0, 0, 0, 0, 0))
        per_setting = jax.vmap(per_sequence, (0, 0, 0, 0, None, None))
        return per_setting(self.settings, credits, q, v, data.rewards, self._discounts(data))

    def _discounts(self, data: Sequences) -> Array:
        return jnp.where(data.ended, 0.0, self.discount)

    def _learn_u(self, paths: Paths, data: Sequences) -> tuple[Paths, Array]:
        """One step of the networks of u, and u `[clips, batch, T]` before it."""
        ratios, discounts = _pi_taken(data) / data.mu, self._discounts(data)

        def one(paths: Paths, clip: Array) -> tuple[Paths, Array]:
            clipped = clip_ratios(ratios, clip)
            scores = partial(self._log_u, data=data)
            paths, _, u = path_network.update(self.loss, paths, scores, clipped, discounts, clip=clip)
            return paths, u

        return jax.vmap(one)(paths, jnp.asarray(self.clips))

    def _log_u(self, network: PathNetwork, data: Sequences) -> Array:
        """log u `[batch, T]`; zero at the first two steps, where u is 1."""
        states = jnp.concatenate([data.observations[:, :1], data.observations[:, 2 : self.sizes.length]], 1)
        features = network.trunk.features(patches(states.astype(jnp.float32)))
        action = jax.nn.one_hot(data.actions[:, 0], self.actions)
        later = network(features[:, 1:], jnp.concatenate([features[:, 0], action], -1)[:, None])
        return jnp.concatenate([jnp.zeros((len(later), 2)), later], 1)

    def _fresh_u(self, key: Array) -> Paths:
        units = self.sizes.units
        trunk_key, head_key = jax.random.split(key)
        trunk = self._network(1, trunk_key)
        network = PathNetwork(units, units + self.actions, (units,), key=head_key, trunk=trunk)
        return path_network.init(self.loss, network)

    def _network(self, outputs: int, key: Array) -> Network:
        shape = {"filters": self.sizes.filters, "units": self.sizes.units}
        return Network(self.game.observation_shape, outputs, **shape, key=key)


def _copies(tree: Any, count: int) -> Any:
    """The same arrays with a new leading axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


def _pi_taken(data: Sequences) -> Array:
    """Target probabilities of the actions taken, `[…, T]`."""
    return jnp.take_along_axis(data.pi[..., :-1, :], data.actions[..., None], -1)[..., 0]


def _relative_error(network: Network, true: Truth) -> Array:
    """`errors` of an `Evaluation`, for one network."""
    q = network(patches(true.observations))
    value = jnp.take_along_axis(q, true.actions[:, None], 1)[:, 0]
    squared_error = jnp.mean((value - true.values) ** 2 - true.errors**2)
    return jnp.sqrt(jnp.maximum(squared_error, 0)) / true.values.std()


def check(settings: Sequence[Setting], sizes: Sizes) -> None:
    """Raises ValueError for settings that cannot be run.

    >>> check([Setting("retrace", 1.0, 4.0)], Sizes(length=70))
    Traceback (most recent call last):
    ...
    ValueError: settings[0]: products of 69 traces of up to 4 overflow single precision; ...
    """
    coefficients(settings)
    checks.positive("sizes.learning_rate", sizes.learning_rate)
    checks.at_least("sizes.last_rate", sizes.last_rate, 0.0)
    if not 3 <= sizes.length <= sizes.steps:
        raise ValueError(
            f"sizes.length must lie between 3 and the {sizes.steps} steps of a phase, got {sizes.length}"
        )
    if sizes.probes > sizes.pairs:
        raise ValueError(
            f"sizes.probes must lie between 1 and the {sizes.pairs} held-out pairs, got {sizes.probes}"
        )
    if sizes.period % sizes.reports:
        raise ValueError(
            f"sizes.period must be a multiple of sizes.reports, got {sizes.period} and {sizes.reports}"
        )
    for k, each in enumerate(settings):
        finite = np.isfinite(each.clip) and each.operator in ("retrace", "vtrace", "marginalized")
        if finite and (sizes.length - 1) * np.log(each.clip) > np.log(np.finfo(np.float32).max):
            raise ValueError(
                f"settings[{k}]: products of {sizes.length - 1} traces of up to {each.clip:g} overflow single "
                "precision; take a lower clip or shorter sequences"
            )


def train_policy(
    game: Game, *, discount: float, sizes: Sizes, phases: int, key: Array, epsilons: tuple[float, float]
) -> Network:
    """A Q-network for ε-greedy policies, trained by policy iteration: in each phase Retrace evaluates the greedy policy.

    Args:
        game: The game.
        discount: γ.
        sizes: Sizes of the program. Its `phases` only set the schedule of the learning rate, which then stays constant.
        phases: Number of phases; each starts from the policy of the network before it.
        key: A JAX random key.
        epsilons: ε of the target policy and ε of the behaviour policy.
    """
    init, phase = program(game, [Setting("retrace", 0.9, 1.0)], PathLoss(), discount=discount, sizes=sizes)

    def uniform(observations: Array) -> Array:
        return jnp.full((len(observations), actions_of(game)), 1 / actions_of(game))

    def improve(agents: Agents, key: Array) -> tuple[Agents, None]:
        network = jax.tree.map(lambda x: x[0], agents.q)
        pi, mu = (epsilon_greedy(network, epsilon) for epsilon in epsilons)
        return phase(pi, mu, None, agents, key)[0], None

    first, rest = jax.random.split(key)
    agents, _ = jax.lax.scan(improve, init(uniform, first), jax.random.split(rest, phases))
    return jax.tree.map(lambda x: x[0], agents.q)
