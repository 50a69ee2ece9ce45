"""The peers of `benchmarks/td3.py`, for an environment of their own: `python td3_peers.py {sb3,sbx,cleanrl} SECONDS`.

`cleanrl` is not a package: its loop here follows cleanrl's `td3_continuous_action_jax.py` (one jitted call for the critics
a step, one for actor and targets every second step, an action from the device every step, the replay buffer of
Stable-Baselines3 that cleanrl carries), with what does not cost time left out: logging, vector environments of one.

Each runs HalfCheetah-v5, one update a step, networks 2×256, batch 100. It says `ready` once it is learning, waits for a
line, and prints its steps a second in so many seconds, of the clock and of processor time.
"""

import argparse
import sys
import time

WARM_UP, BATCH, SIMULATOR = 1500, 100, "HalfCheetah-v5"


class Clock:
    """Counts steps between a signal and the end of the time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps, self.started, self.cpu = seconds, 0, None, 0.0

    def tick(self) -> bool:
        """One more step; False when the time is over."""
        self.steps += 1
        if self.started is None:
            if self.steps < WARM_UP:
                return True
            print("ready", flush=True)
            sys.stdin.readline()
            self.started, self.cpu, self.steps = time.perf_counter(), time.process_time(), 0
        elapsed = time.perf_counter() - self.started
        if elapsed < self.seconds:
            return True
        print(self.steps / elapsed, self.steps / (time.process_time() - self.cpu), flush=True)
        return False


def baselines(name: str, clock: Clock) -> None:
    from stable_baselines3.common.callbacks import BaseCallback

    if name == "sb3":
        from stable_baselines3 import TD3
    else:
        from sbx import TD3

    class Ticking(BaseCallback):
        def _on_step(self) -> bool:
            return clock.tick()

    model = TD3(
        "MlpPolicy",
        SIMULATOR,
        batch_size=BATCH,
        train_freq=1,
        gradient_steps=1,
        learning_starts=1000,
        policy_kwargs={"net_arch": [256, 256]},
    )
    model.learn(10**9, callback=Ticking())


def cleanrl(clock: Clock) -> None:
    import flax
    import flax.linen as nn
    import gymnasium as gym
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.training import train_state
    from stable_baselines3.common.buffers import ReplayBuffer

    class QNetwork(nn.Module):
        @nn.compact
        def __call__(self, x, a):
            x = jnp.concatenate([x, a], -1)
            x = nn.relu(nn.Dense(256)(x))
            x = nn.relu(nn.Dense(256)(x))
            return nn.Dense(1)(x)

    class Actor(nn.Module):
        action_dim: int

        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(256)(x))
            x = nn.relu(nn.Dense(256)(x))
            return nn.tanh(nn.Dense(self.action_dim)(x))

    class TrainState(train_state.TrainState):
        target_params: flax.core.FrozenDict

    env = gym.make(SIMULATOR)
    buffer = ReplayBuffer(
        10**6, env.observation_space, env.action_space, device="cpu", handle_timeout_termination=False
    )
    obs = env.reset(seed=1)[0][None].astype(np.float32)
    sample = env.action_space.sample()[None]
    key, actor_key, qf1_key, qf2_key = jax.random.split(jax.random.PRNGKey(1), 4)
    actor, qf, tx = Actor(sample.shape[1]), QNetwork(), optax.adam(1e-3)
    actor_state = TrainState.create(
        apply_fn=actor.apply,
        params=actor.init(actor_key, obs),
        target_params=actor.init(actor_key, obs),
        tx=tx,
    )
    qf1_state, qf2_state = (
        TrainState.create(
            apply_fn=qf.apply, params=qf.init(k, obs, sample), target_params=qf.init(k, obs, sample), tx=tx
        )
        for k in (qf1_key, qf2_key)
    )
    policy, random = jax.jit(actor.apply), np.random.default_rng(1)

    @jax.jit
    def update_critic(actor_state, qf1_state, qf2_state, x, a, x_next, rewards, terminations, key):
        key, noise_key = jax.random.split(key, 2)
        noise = jnp.clip(jax.random.normal(noise_key, a.shape) * 0.2, -0.5, 0.5)
        a_next = jnp.clip(actor.apply(actor_state.target_params, x_next) + noise, -1, 1)
        q1 = qf.apply(qf1_state.target_params, x_next, a_next).reshape(-1)
        q2 = qf.apply(qf2_state.target_params, x_next, a_next).reshape(-1)
        target = rewards + (1 - terminations) * 0.99 * jnp.minimum(q1, q2)

        def loss(params):
            values = qf.apply(params, x, a).squeeze()
            return ((values - target) ** 2).mean(), values.mean()

        states = []
        for state in (qf1_state, qf2_state):
            _, grads = jax.value_and_grad(loss, has_aux=True)(state.params)
            states.append(state.apply_gradients(grads=grads))
        return *states, key

    @jax.jit
    def update_actor(actor_state, qf1_state, qf2_state, x):
        def loss(params):
            return -qf.apply(qf1_state.params, x, actor.apply(params, x)).mean()

        actor_state = actor_state.apply_gradients(grads=jax.grad(loss)(actor_state.params))
        return tuple(
            s.replace(target_params=optax.incremental_update(s.params, s.target_params, 0.005))
            for s in (actor_state, qf1_state, qf2_state)
        )

    for step in range(10**9):
        if step < 1000:
            action = env.action_space.sample()
        else:
            action = jax.device_get(policy(actor_state.params, obs))[0]
            action = (action + random.normal(0, 0.1, action.shape)).clip(-1, 1).astype(np.float32)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        next_obs = next_obs[None].astype(np.float32)
        buffer.add(obs, next_obs, action[None], np.array([reward]), np.array([terminated]), [{}])
        obs = env.reset()[0][None].astype(np.float32) if terminated or truncated else next_obs
        if step > 1000:
            data = buffer.sample(BATCH)
            x = data.observations.numpy()
            arrays = (x, data.actions.numpy(), data.next_observations.numpy())
            more = (data.rewards.flatten().numpy(), data.dones.flatten().numpy())
            qf1_state, qf2_state, key = update_critic(actor_state, qf1_state, qf2_state, *arrays, *more, key)
            if step % 2 == 0:
                actor_state, qf1_state, qf2_state = update_actor(actor_state, qf1_state, qf2_state, x)
        if not clock.tick():
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("peer", choices=("sb3", "sbx", "cleanrl"))
    parser.add_argument("seconds", type=float)
    words = parser.parse_args()
    cleanrl(Clock(words.seconds)) if words.peer == "cleanrl" else baselines(words.peer, Clock(words.seconds))
