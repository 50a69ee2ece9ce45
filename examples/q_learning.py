"""Q-learning with marginalized targets: the whole agent in one file, with public functions only.

    python examples/q_learning.py --steps 100000 --operator marginalized

One loop plays a Gymnasium environment with an ε-greedy policy, stores the transitions with the probabilities of their
actions, and learns from sequences of them. `marginax train` adds many seeds in one program, checkpoints, metrics and speed.

The target of Q at the first pair of a sequence is

    Q(x_0, a_0) + Σ_t γ^t w_t (r_t + γ Q(x_{t+1}, π) - Q(x_t, a_t)),

and operators differ in the credit w_t. One-step: 1 for t = 0, then 0. Retrace: the product of traces c = λ min(c̄, π/μ).
Marginalized: the mean of that product given the start pair and (x_t, a_t), λ^t u(x_t | x_0, a_0) min(c̄, π/μ), with a network for u.
"""

import argparse
from functools import partial

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax

import marginax as mx
from marginax.weights import losses

parser = argparse.ArgumentParser()
parser.add_argument("--environment", default="CartPole-v1")
parser.add_argument("--operator", choices=["one-step", "retrace", "marginalized"], default="marginalized")
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--length", type=int, default=5, help="steps of a sequence")
parser.add_argument("--discount", type=float, default=0.99)
parser.add_argument("--decay", type=float, default=0.8, help="λ")
parser.add_argument("--clip", type=float, default=1.0, help="c̄")
parser.add_argument("--epsilon", type=float, default=0.1, help="of the behaviour policy, at last")
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--learning-rate", type=float, default=5e-4)
parser.add_argument("--learning-starts", type=int, default=1_000)
parser.add_argument("--update-every", type=int, default=10, help="steps between updates")
parser.add_argument(
    "--target-every", type=int, default=500, help="steps between copies to the target network"
)


class Agent(eqx.Module):
    """Q, its target network, log u, and Adam's states."""

    q: eqx.nn.MLP
    target: eqx.nn.MLP
    log_u: eqx.nn.MLP
    q_optimiser: optax.OptState
    u_optimiser: optax.OptState


def make_agent(states: int, actions: int, args: argparse.Namespace) -> Agent:
    q_key, u_key = jax.random.split(jax.random.key(args.seed))
    q = eqx.nn.MLP(states, actions, args.hidden, 2, key=q_key)
    # u sees a state, the start state and the start action, and begins at 1.
    u = eqx.nn.MLP(2 * states + actions, "scalar", args.hidden, 2, key=u_key)
    u = eqx.tree_at(lambda m: (m.layers[-1].weight, m.layers[-1].bias), u, replace_fn=jnp.zeros_like)
    adam = optax.adam(args.learning_rate)
    return Agent(q, q, u, adam.init(eqx.filter(q, eqx.is_array)), adam.init(eqx.filter(u, eqx.is_array)))


class Replay:
    """All transitions in order, with the probability of the action taken."""

    def __init__(self, size: int, states: int) -> None:
        self.x, self.following = np.zeros((2, size, states), np.float32)
        self.a = np.zeros(size, np.int32)
        self.r, self.mu = np.zeros((2, size), np.float32)
        self.terminal, self.cut = np.zeros((2, size), bool)
        self.count = 0

    def add(self, x, a, r, following, terminal, truncated, mu) -> None:
        i = self.count
        self.x[i], self.a[i], self.r[i], self.following[i] = x, a, r, following
        self.terminal[i], self.cut[i], self.mu[i] = terminal, truncated, mu
        self.count += 1

    def sample(self, generator: np.random.Generator, batch: int, length: int) -> dict[str, np.ndarray]:
        """Sequences `[batch, length]`. They may run past the end of an episode, where the targets and losses cut them."""
        times = generator.integers(self.count - length + 1, size=batch)[:, None] + np.arange(length)
        names = ("x", "a", "r", "following", "terminal", "cut", "mu")
        return {name: getattr(self, name)[times] for name in names}


def greedy(q: jax.Array) -> jax.Array:
    return jax.nn.one_hot(q.argmax(-1), q.shape[-1])


def one_target(agent: Agent, s: dict[str, jax.Array], args: argparse.Namespace) -> tuple[jax.Array, ...]:
    """The target of one sequence, and the ratios and discounts that the network of u learns from."""
    q = jax.vmap(agent.target)(s["x"])
    q_next = jax.vmap(agent.target)(s["following"])
    taken = mx.targets.select_actions(q, s["a"])
    v_next = jnp.sum(q_next * greedy(jax.vmap(agent.q)(s["following"])), -1)  # double Q-learning
    pi = jnp.take_along_axis(greedy(jax.vmap(agent.q)(s["x"])), s["a"][:, None], 1)[:, 0]
    ratios = mx.traces.clip_ratios(pi / s["mu"], args.clip)
    discounts = jnp.where(s["terminal"], 0.0, args.discount)
    arrays = (taken, v_next, s["r"], discounts)
    if args.operator == "one-step":
        target = mx.targets.multi_step(*arrays, jnp.zeros_like(ratios), s["cut"])
    elif args.operator == "retrace":
        target = mx.targets.multi_step(*arrays, args.decay * ratios, s["cut"])
    else:
        times = jnp.arange(len(ratios))
        log_bound = jnp.log(args.clip) * (times - 1)  # no product of the t - 1 traces on the way is larger
        u = jnp.where(times < 2, 1.0, jnp.exp(jnp.minimum(scores(agent.log_u, s), log_bound)))
        weights = jnp.where(times == 0, 1.0, args.decay**times * u * ratios)
        target = mx.targets.marginalized(*arrays, weights, s["cut"])
    return target[0], ratios, discounts


def scores(log_u: eqx.nn.MLP, s: dict[str, jax.Array]) -> jax.Array:
    """log u of every state of a sequence."""
    action = jax.nn.one_hot(s["a"][0], log_u.in_size - 2 * s["x"].shape[-1])
    start = jnp.concatenate([s["x"][0], action])
    return jax.vmap(lambda x: log_u(jnp.concatenate([x, start])))(s["x"])


def make_update(args: argparse.Namespace):
    adam = optax.adam(args.learning_rate)

    def step(network, optimiser, gradient):
        moves, optimiser = adam.update(gradient, optimiser)
        return eqx.apply_updates(network, moves), optimiser

    @eqx.filter_jit
    def update(agent: Agent, batch: dict[str, jax.Array]) -> tuple[Agent, jax.Array]:
        target, ratios, discounts = jax.vmap(partial(one_target, agent, args=args))(batch)

        @eqx.filter_value_and_grad
        def q_loss(q: eqx.nn.MLP) -> jax.Array:
            values = jax.vmap(lambda x, a: q(x)[a])(batch["x"][:, 0], batch["a"][:, 0])
            return jnp.mean((values - target) ** 2)

        @eqx.filter_grad
        def u_loss(log_u: eqx.nn.MLP) -> jax.Array:
            loss = partial(losses.path_deviance, power=1.0)
            return jnp.mean(
                jax.vmap(lambda s, c, d: loss(scores(log_u, s), c, d, s["cut"]))(batch, ratios, discounts)
            )

        error, gradient = q_loss(agent.q)
        q, q_optimiser = step(agent.q, agent.q_optimiser, gradient)
        u, u_optimiser = agent.log_u, agent.u_optimiser
        if args.operator == "marginalized":
            u, u_optimiser = step(u, u_optimiser, u_loss(u))
        return Agent(q, agent.target, u, q_optimiser, u_optimiser), error

    return update


def main(words: list[str] | None = None) -> list[float]:
    """Train, print the mean return of the last 20 episodes now and then, and return all episodes' returns."""
    args = parser.parse_args(words)
    environment = gym.make(args.environment)
    states, actions = environment.observation_space.shape[0], int(environment.action_space.n)
    agent, update = make_agent(states, actions, args), make_update(args)
    values = eqx.filter_jit(lambda network, x: network(x))
    replay, generator = Replay(args.steps, states), np.random.default_rng(args.seed)
    returns, total = [], 0.0
    x, _ = environment.reset(seed=args.seed)
    for number in range(args.steps):
        epsilon = max(args.epsilon, 1 - number / (args.steps / 4))
        best = int(values(agent.q, jnp.asarray(x)).argmax())
        a = int(generator.integers(actions)) if generator.random() < epsilon else best
        mu = epsilon / actions + (1 - epsilon) * (a == best)
        following, r, terminal, truncated, _ = environment.step(a)
        replay.add(x, a, r, following, terminal, truncated, mu)
        total, x = total + float(r), following
        if terminal or truncated:
            returns.append(total)
            total = 0.0
            x, _ = environment.reset()
        if number >= args.learning_starts and number % args.update_every == 0:
            agent, _ = update(agent, replay.sample(generator, args.batch, args.length))
        if number % args.target_every == 0:
            agent = eqx.tree_at(lambda agent: agent.target, agent, agent.q)
        if number % (args.steps // 10) == 0 and returns:
            print(f"step {number:,}: return {np.mean(returns[-20:]):.1f} over the last episodes")
    return returns


if __name__ == "__main__":
    main()
