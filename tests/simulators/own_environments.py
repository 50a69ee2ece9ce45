"""Environments as a user might register them; named `simulators.own_environments:Id` in the tests."""

import collections
import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers


class Point(gymnasium.Env):
    """A point on a line that is pushed by the action; every episode starts a little further away."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Box(-3.0, 5.0, (1,), np.float32)

    def __init__(self, actions=None, render_mode=None, changes_actions=False, prints=False, secret=False):
        self.action_space = actions or self.action_space
        self.changes_actions, self.prints = changes_actions, prints
        self.render_mode, self.episodes = render_mode, 0
        self.secret = iter(range(10**9)) if secret else None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.place = np.array([0.1 * self.episodes, self.np_random.normal()])
        return self.place.astype(np.float32), {}

    def step(self, action):
        if self.prints:
            print('{"k": 1}\nhello from step', flush=True)
            os.write(1, b"\0\xff from C, to stdout\n")
            os.write(2, b"and to stderr\n")
        pushed = float(np.ravel(action)[0])
        if self.changes_actions:
            action *= 0
        drift = next(self.secret) if self.secret is not None else 0
        self.place = self.place + np.array([0.1 * pushed, 0.01 * self.np_random.normal() + drift])
        return self.place.astype(np.float32), -abs(self.place[0]), bool(self.place[0] > 50), False, {}

    def render(self):
        return np.full((4, 4, 3), 7, np.uint8)


class Dictionary(Point):
    """Two observations under their names."""

    observation_space = spaces.Dict(
        {"a": spaces.Box(-np.inf, np.inf, (1,)), "b": spaces.Box(-np.inf, np.inf, (1, 1))}
    )

    def reset(self, **options):
        place, info = super().reset(**options)
        return {"a": place[:1], "b": place[1:, None]}, info

    def step(self, action):
        place, *rest = super().step(action)
        return {"a": place[:1], "b": place[1:, None]}, *rest


class Old(Point):
    """What old Gym had: `reset` returns no info (and may take no seed), `step` one end of the episode for two."""

    def __init__(self, old="reset", **options):
        super().__init__(**options)
        self.old = old
        if old == "seed":
            self.reset = lambda: self.place

    def reset(self, *, seed=None, options=None):
        place, info = super().reset(seed=seed)
        return place if self.old == "reset" else (place, info)

    def step(self, action):
        place, reward, terminated, _, info = super().step(action)
        return (
            (place[:1], reward, terminated, False, info)
            if self.old == "shape"
            else (place, reward, terminated, info)
        )


class Breaking(Point):
    """It raises an error at its 130th step."""

    taken = 0

    def step(self, action):
        self.taken += 1
        if self.taken == 130:
            raise KeyError("a wheel came off")
        return super().step(action)


class Spring:
    """A plain object that outlives episodes."""

    def __init__(self):
        self.length = 0.0


class Nested(Point):
    """Generators, plain objects and one array twice in containers, and a generator or object made at the first step."""

    def __init__(self, lazy="generator", **options):
        super().__init__(**options)
        self.lazy, self.first = lazy, None
        old = np.random.RandomState(4)
        start = np.zeros(2)
        self.frames = collections.deque([start] * 60, maxlen=60)
        self.parts = {"noise": [np.random.default_rng(3), old], "springs": (Spring(), Spring())}

    def step(self, action):
        if self.first is None:
            self.first = np.random.default_rng(5) if self.lazy == "generator" else Spring()
        place, reward, *rest = super().step(action)
        reward += np.sum(self.frames)
        self.frames.append(place.astype(float))
        if self.lazy == "generator":
            reward += self.first.normal()
        else:
            self.first.length += 1
            reward += self.first.length
        for noise in self.parts["noise"]:
            reward += noise.normal()
        for i, spring in enumerate(self.parts["springs"]):
            spring.length += i + 1
            reward += spring.length
        return place, reward, *rest


class Slow(Point):
    """One step takes an hour."""

    def step(self, action):
        time.sleep(3600)
        return super().step(action)


def register(name, entry_point, **options):
    gymnasium.register(name, entry_point, max_episode_steps=20, **options)


register("Point-v0", Point)
register("Thousand-v0", lambda **k: wrappers.TransformReward(Point(**k), lambda reward: reward + 1000))
register(
    "Rescaled-v0",
    lambda **k: wrappers.RescaleAction(Point(**k), np.float32([-1.0]), np.float32([1.0])),
)
register("Flattened-v0", lambda **k: wrappers.FlattenObservation(Dictionary(**k)))
register("Normalised-v0", lambda **k: wrappers.NormalizeReward(wrappers.NormalizeObservation(Point(**k))))
register("Infinite-v0", lambda **k: Point(spaces.Box(-np.inf, np.inf, (1,), np.float32), **k))
register("Huge-v0", lambda **k: Point(spaces.Box(-1e300, 1e300, (1,), np.float64), **k))
register("Integers-v0", lambda **k: Point(spaces.Box(-1, 1, (1,), np.int64), **k))
register("Discrete-v0", lambda **k: Point(spaces.Discrete(3, start=-1), **k))
register("Dictionary-v0", Dictionary)
register("Changing-v0", Point, kwargs={"changes_actions": True})
register("Printing-v0", Point, kwargs={"prints": True})
register("Secret-v0", Point, kwargs={"secret": True})
register("Nested-v0", Nested)
register("Lazy-v0", Nested, kwargs={"lazy": "spring"})
register("Slow-v0", Slow)
register("Breaking-v0", Breaking)
for old in ("reset", "seed", "step", "shape"):
    register(f"Old-{old}-v0", Old, kwargs={"old": old})
gymnasium.register("Lost-v0", "simulators.own_environments:NoSuchClass")
