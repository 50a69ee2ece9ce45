"""The training of one seed: simulate a block, learn a block, now and then evaluate and keep a checkpoint.

Everything a seed draws follows from its number and the number of the block, so nothing about other seeds, the
number of processes or an interruption changes what it does.
"""

import dataclasses
import json
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from marginax.deep import checkpoint, networks, replay, td3
from marginax.deep.policy import Policy
from marginax.deep.run import METRICS, Run, read_status, write_status
from marginax.simulators.rollout import Actor, AgentSpec, Transitions, evaluate

Report = Callable[[dict[str, Any]], None]
_SEGMENT = "replay"


class Diverged(RuntimeError):
    """Learning produced NaN, infinity or values beyond any return; the message says where it began."""


class Trainer:
    """One seed of a run: its agent, simulator, replay buffer and files.

    >>> import tempfile
    >>> from marginax.deep.config import TD3Config
    >>> agent = TD3Config(hidden=(8,), batch_size=4, random_steps=50, update_after=50)
    >>> run = Run(
    ...     simulator="Pendulum-v1", steps=100, evaluate_every=100, checkpoint_every=100, episodes=1, agent=agent
    ... )
    >>> trainer = Trainer(run, seed=0, folder=Path(tempfile.mkdtemp()))
    >>> trainer.train()["state"]
    'finished'
    """

    def __init__(self, run: Run, seed: int, folder: Path, report: Report = lambda message: None) -> None:
        self.run, self.seed, self.folder, self.report = run, seed, folder, report
        folder.mkdir(parents=True, exist_ok=True)
        config = run.agent
        self.spec = AgentSpec(run.simulator, seed, config.act_noise, config.random_steps)
        self.actor = Actor(self.spec)
        simulator = self.actor.simulator
        self.sizes = {"observation_size": simulator.observation_size, "action_size": simulator.action_size}
        self.key = jax.random.key(seed)
        self.state = jax.jit(lambda key: td3.init(config, **self.sizes, key=key))(self.key)
        self.buffer = replay.empty(min(config.replay_size, run.steps), *self.sizes.values())
        self.step = 0
        self.episode_return = 0.0
        self.largest_reward = 0.0
        self.learned: list[dict[str, float]] = []
        self.finished_episodes: list[float] = []
        self.saved_until = 0  # transitions already in the checkpoint
        self.add = jax.jit(replay.add, donate_argnums=0)
        block = partial(td3.update_block, config, updates=config.update_every)
        self.update = jax.jit(block, donate_argnums=0)

    def train(self) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one.

        Returns:
            The final status.
        """
        status = read_status(self.folder)
        if status["state"] == "diverged" or (
            status["state"] == "finished" and status["step"] >= self.run.steps
        ):
            return status
        self._resume()
        write_status(self.folder, "running", self.step)
        clock = deque([(time.monotonic(), self.step)], maxlen=40)
        try:
            with _Logger(self.folder, self.step) as log:
                while self.step < self.run.steps:
                    self._advance()
                    clock.append((time.monotonic(), self.step))
                    speed = (self.step - clock[0][1]) / max(clock[-1][0] - clock[0][0], 1e-9)
                    message = {"seed": self.seed, "step": self.step, "speed": speed}
                    if self.step % self.run.evaluate_every == 0 or self.step == self.run.steps:
                        line = self._evaluate()
                        log.write(line, speed)
                        message["return"] = line["return"]
                        if self.step % self.run.checkpoint_every == 0 or self.step == self.run.steps:
                            self._save(log.flush())
                    self.report(message)
        except Diverged as error:
            write_status(self.folder, "diverged", self.step, reason=str(error))
        else:
            write_status(self.folder, "finished", self.step)
        return read_status(self.folder)

    def _advance(self) -> None:
        """One block of steps and, once there are enough, as many updates."""
        config, size = self.run.agent, self.run.agent.update_every
        index = self.step // size
        layers = networks.layers(self.state.actor)
        if not all(np.isfinite(x).all() for layer in layers for x in layer):
            raise Diverged(f"the actor's parameters were no longer finite at step {self.step}")
        block = Transitions(
            np.zeros((size, self.buffer.rows.shape[1]), np.float32), self.sizes["observation_size"]
        )
        self.actor.play(index, layers, block)
        self._watch(block)
        self.buffer = self.add(self.buffer, block.rows)
        self.step += size
        if self.step >= config.update_after:
            key = jax.random.fold_in(self.key, index)
            self.state, metrics = self.update(self.state, self.buffer, key)
            self._check(metrics)

    def _watch(self, block: Transitions) -> None:
        """Episode returns, the largest reward, and nothing that is not a number."""
        if not np.isfinite(block.rows).all():
            row, column = np.argwhere(~np.isfinite(block.rows))[0]
            raise Diverged(f"the simulator returned {block.rows[row, column]} at step {self.step + int(row)}")
        self.largest_reward = max(self.largest_reward, float(np.abs(block.rewards).max()))
        for reward, ended in zip(block.rewards, block.terminated + block.truncated, strict=True):
            self.episode_return += float(reward)
            if ended:
                self.finished_episodes.append(self.episode_return)
                self.episode_return = 0.0

    def _check(self, metrics: td3.Metrics) -> None:
        values = {f.name: np.asarray(getattr(metrics, f.name)) for f in dataclasses.fields(metrics)}
        config = self.run.agent
        bound = config.divergence * max(self.largest_reward, 1e-3) / (1 - config.discount)
        first = self.step - config.update_every + 1
        for name, array in values.items():
            if not np.isfinite(array).all():
                update = int(np.argmin(np.isfinite(array)))
                raise Diverged(f"{name} became {array[update]} at step {first + update}")
        if (values["q_size"] > bound).any():
            update = int(np.argmax(values["q_size"] > bound))
            raise Diverged(
                f"the mean of |Q| reached {values['q_size'][update]:.3g} at step {first + update}, far above "
                f"the {bound / config.divergence:.3g} that rewards up to {self.largest_reward:.3g} allow"
            )
        # Some of them are known in the delayed updates alone.
        alone = ("weight_loss", "trace_mean") if config.samples_a_step else ("weight_loss",)
        delay = min(config.policy_delay, config.update_every)
        seen = {name: array[delay - 1 :: delay] if name in alone else array for name, array in values.items()}
        mean = {name: float(array.mean()) for name, array in seen.items()}
        self.learned.append(mean | {"weight_max": float(values["weight_max"].max())})

    def _evaluate(self) -> dict[str, Any]:
        """Returns of the deterministic policy, and the means of what was learned since the last time."""
        number = self.step // self.run.evaluate_every
        layers = networks.layers(self.state.actor)
        outcomes = [x for x in evaluate(self.spec, layers, number, self.run.episodes) if x is not None]
        line: dict[str, Any] = {"step": self.step, "return": float(np.mean(outcomes[-1]))}
        line["returns"] = [float(x) for x in outcomes[-1]]
        line["training_return"] = float(np.mean(self.finished_episodes)) if self.finished_episodes else None
        for name in self.learned[0] if self.learned else ():
            values = [entry[name] for entry in self.learned]
            line[name] = max(values) if name == "weight_max" else float(np.mean(values))
        self.learned, self.finished_episodes = [], []
        return line

    def _save(self, metrics_bytes: int) -> None:
        """A checkpoint: the agent, the simulator, and what the replay buffer gained since the last one."""
        bounds = (self.actor.simulator.action_low, self.actor.simulator.action_high)
        policy = (networks.layers(self.state.actor), *bounds, self.run.agent.act_noise, self.run.simulator)
        Policy(*policy).save(self.folder / "policy.npz")
        files: dict[str, Any] = {f"agent-{self.step}": checkpoint.to_arrays(self.state)}
        simulator = self.actor.get_state()
        plain = {k: v for k, v in simulator.items() if isinstance(v, (int, str)) and not isinstance(v, bool)}
        files[f"simulator-{self.step}"] = {k: v for k, v in simulator.items() if k not in plain}
        capacity = self.buffer.rows.shape[0]
        first = max(self.saved_until, self.step - capacity)
        if first < self.step:
            rows = np.asarray(self.buffer.rows)[np.arange(first, self.step) % capacity]
            files[f"{_SEGMENT}-{first}-{self.step}"] = {"rows": rows}
        previous = checkpoint.names(self.folder / "checkpoint")
        keep = [n for n in previous if n.startswith(_SEGMENT) and _until(n) > self.step - capacity]
        meta = {
            "step": self.step,
            "metrics_bytes": metrics_bytes,
            "episode_return": self.episode_return,
            "largest_reward": self.largest_reward,
            "simulator": plain,
        }
        checkpoint.save(self.folder / "checkpoint", meta, files, keep)
        self.saved_until = self.step

    def _resume(self) -> None:
        """Continue from the last checkpoint, and forget what was logged after it."""
        found = checkpoint.load(self.folder / "checkpoint")
        metrics = self.folder / METRICS
        if metrics.exists():
            os.truncate(metrics, found.meta["metrics_bytes"] if found else 0)
        if found is None:
            return
        meta, files = found
        self.step, self.saved_until = meta["step"], meta["step"]
        self.episode_return, self.largest_reward = meta["episode_return"], meta["largest_reward"]
        self.state = jax.device_put(checkpoint.from_arrays(self.state, files[f"agent-{self.step}"]))
        self.actor.set_state({**files[f"simulator-{self.step}"], **meta["simulator"]})
        rows = np.zeros(self.buffer.rows.shape, np.float32)
        for name in sorted((n for n in files if n.startswith(_SEGMENT)), key=_until):
            piece = files[name]["rows"]
            rows[np.arange(_until(name) - len(piece), _until(name)) % len(rows)] = piece
        self.buffer = replay.Replay(
            jax.device_put(rows), jax.device_put(np.int32(self.step)), self.sizes["observation_size"]
        )


class _Logger:
    """Metrics as JSON lines (which repeat exactly) and, if tensorboardX is there, for TensorBoard (with speeds)."""

    def __init__(self, folder: Path, step: int) -> None:
        self.file = (folder / METRICS).open("ab")
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            self.board = None
        else:
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step, write_to_disk=True)

    def __enter__(self) -> "_Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()

    def write(self, line: dict[str, Any], speed: float) -> None:
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()
        if self.board is not None:
            for name, value in {**line, "speed": speed}.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, line["step"])

    def flush(self) -> int:
        """Bring the lines to the disk; returns the file's length."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()


def _until(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
