"""A trained policy as a file: networks, action bounds and where it was trained; nothing in it is executed."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from marginax._files import check_writable, load_arrays, save_arrays
from marginax.deep.metrics import agent_name
from marginax.simulators.policy import Layers, outputs, to_bounds
from marginax.simulators.protocol import Simulator, optional_import
from marginax.simulators.registry import make

_FPS = 30  # frames per second of a film


class Policy(NamedTuple):
    """A deterministic policy: a network whose outputs are an action in a box, or one number for each discrete action.

    Attributes:
        layers: Weights `[in, out]` and biases `[out]`.
        low: Smallest action.
        high: Largest action.
        scale: Standard deviation of its exploration in a box, for actions scaled to [-1, 1]; 0 for discrete actions.
        simulator: Name of the simulator it was trained on.

    >>> layers = [(np.zeros((3, 1), np.float32), np.zeros(1, np.float32))]
    >>> policy = Policy(layers, np.array([-2.0]), np.array([2.0]), 0.1, "Pendulum-v1")
    >>> policy(np.ones((5, 3), np.float32)).shape
    (5, 1)
    >>> best = [(np.eye(3, dtype=np.float32), np.zeros(3, np.float32))]
    >>> Policy(best, np.array([0.0]), np.array([2.0]), 0.0, "grid/catch")(np.array([[0.1, 0.9, 0.2]], np.float32))
    array([1])
    """

    layers: Layers
    low: np.ndarray
    high: np.ndarray
    scale: float
    simulator: str

    @property
    def num_actions(self) -> int | None:
        """How many discrete actions there are; None in a box. A discrete action is one number, with an output for each value."""
        count = self.layers[-1][1].shape[-1]
        return count if count != len(self.low) else None

    def __call__(self, observations: np.ndarray) -> np.ndarray | np.integer:
        """Actions for observations `[n]` or `[batch, n]`: within the bounds, or the indices of the best discrete ones."""
        found = outputs(self.layers, observations)
        if self.num_actions is not None:
            return np.argmax(found, axis=-1)
        return to_bounds(np.tanh(found), self.low, self.high)

    def check_fits(self, name: str, simulator: Simulator) -> None:
        """Raise `ValueError` if the policy cannot play a simulator."""
        inputs = len(self.layers[0][0])
        if inputs != simulator.observation_size:
            raise ValueError(
                f"the policy needs observations of {inputs} numbers, as {self.simulator!r} has them, "
                f"but those of {name!r} have {simulator.observation_size}"
            )
        ours = _actions(self.num_actions, len(self.low))
        if ours != (theirs := _actions(simulator.num_actions, simulator.action_size)):
            raise ValueError(
                f"the policy chooses {ours}, as {self.simulator!r} has them, but {name!r} has {theirs}"
            )

    def save(self, path: Path) -> None:
        """Write the policy, whole or not at all."""
        arrays = {"low": self.low, "high": self.high, "scale": self.scale, "simulator": self.simulator}
        for i, (weight, bias) in enumerate(self.layers):
            arrays |= {f"weight_{i}": weight, f"bias_{i}": bias}
        save_arrays(path, arrays)


def _actions(count: int | None, size: int) -> str:
    """The actions of a simulator, in words."""
    return f"actions of {size} numbers" if count is None else f"{count} discrete actions"


def film(
    policy: Policy,
    simulator: str,
    seed: int,
    *,
    video: Path | None = None,
    show: bool = False,
    allow_import: bool = False,
) -> int:
    """Play one episode of a policy and draw it with the simulator's own renderer.

    Args:
        policy: The policy.
        simulator: Name for [`make`][marginax.simulators.make].
        seed: Of the episode.
        video: File to write, .mp4 or .gif; an .mp4 needs the extra `video`.
        show: Whether to show it in a window.
        allow_import: Accept a simulator `module:Id`.

    Returns:
        The number of frames.

    Raises:
        ValueError: If the file's ending is another, or the simulator cannot be drawn.
        ImportError: If a package is missing.
    """
    if video is not None:
        if video.suffix not in (".mp4", ".gif"):
            raise ValueError(f"video must end with .mp4 or .gif, got {str(video)!r}.")
        imageio = optional_import("imageio.v2", f"--video {video}", extra="video")
        if video.suffix == ".mp4":
            optional_import("imageio_ffmpeg", f"--video {video}", extra="video")
        check_writable(video.parent)
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame draws, and would look for a sound card
    world = make(simulator, seed, allow_import=allow_import, render=True)
    try:
        policy.check_fits(simulator, world)
        policy = policy._replace(low=world.action_low, high=world.action_high)  # as it is evaluated
        observation, over = world.reset(), False
        frames = [world.render()]
        while not over:
            observation, _, terminated, truncated = world.step(policy(observation))
            frames.append(world.render())
            over = terminated or truncated
    finally:
        world.close()
    if video is not None:
        if video.suffix == ".mp4":
            imageio.mimwrite(video, frames, fps=_FPS, macro_block_size=1)
        else:
            imageio.mimwrite(video, frames, duration=1000 / _FPS, loop=0)
    if show:
        _show(frames)
    return len(frames)


def _show(frames: list[np.ndarray]) -> None:
    """An animation in Matplotlib's window."""
    import matplotlib.pyplot as plt

    _, axis = plt.subplots()
    axis.axis("off")
    picture = axis.imshow(frames[0])
    for frame in frames[1:]:
        picture.set_data(frame)
        plt.pause(1 / _FPS)


def policy_name(label: str, seed: int) -> str:
    """The name of an agent's policy file."""
    return f"policy-{agent_name(label, seed)}.npz"


def find_policy(path: Path | str) -> Path:
    """A policy file: the one that is given, or the first in the folder of a run or of a part of it.

    Raises:
        ValueError: If there is no policy at that place.
    """
    given = Path(path)
    found = [given] if given.is_file() else sorted(given.glob("**/policy-*.npz"), key=_order)
    if not found:
        raise ValueError(f"there is no policy in {str(given)!r}: it is saved with a run's first checkpoint.")
    return found[0]


def load_policy(path: Path | str) -> Policy:
    """Read a policy that `marginax train` saved, from where `find_policy` finds it.

    Raises:
        ValueError: If there is no policy at that place, or the file is damaged.

    >>> import tempfile
    >>> layers = [(np.zeros((3, 1), np.float32), np.zeros(1, np.float32))]
    >>> place = Path(tempfile.mkdtemp()) / "policy-a-seed-0.npz"
    >>> Policy(layers, np.array([-2.0]), np.array([2.0]), 0.1, "Pendulum-v1").save(place)
    >>> load_policy(place).simulator, load_policy(place.parent).scale
    ('Pendulum-v1', 0.1)
    """
    file = find_policy(path)
    try:
        arrays = load_arrays(file)
        count = sum(name.startswith("weight_") for name in arrays)
        layers = [(arrays[f"weight_{i}"], arrays[f"bias_{i}"]) for i in range(count)]
        return Policy(layers, arrays["low"], arrays["high"], float(arrays["scale"]), str(arrays["simulator"]))
    except Exception as error:
        raise ValueError(f"{file} is not a policy saved by marginax train ({error}).") from error


def _order(path: Path) -> tuple[str, int]:
    label, _, seed = path.stem.rpartition("-")
    return label, int(seed) if seed.isdecimal() else 0
