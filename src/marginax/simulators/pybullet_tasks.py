"""PyBullet's walking tasks on PyBullet alone: HalfCheetah, Ant, Hopper, Walker2D.

Equal to `pybullet_envs_gymnasium` step by step: the same models (from `pybullet_data`), the same calls that change
the simulation, in the same order, and the same rewards with their oddities. What is left out is a call for each joint
and each part (forty in a step of HalfCheetah, here five) and the wrappers. Neither gymnasium nor
pybullet_envs_gymnasium need be installed.

NumPy computes what it computes there (sums, dot products, sines), because other functions round differently.
"""

from __future__ import annotations

import math
import weakref
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from marginax.simulators.protocol import action_vector, check_begun, optional_import

_SUBSTEPS, _SUBSTEP = 4, 0.0165 / 4
_INTERVAL = _SUBSTEP * _SUBSTEPS
_TARGET = 1e3  # robots walk towards x = 1 km, y = 0


class PyBulletTask:
    """A task `pybullet/…`; see [`Simulator`][marginax.simulators.Simulator] and `TASKS`.

    A subclass says which model it plays, how strong its motors are, which parts feel the ground, and when the robot
    is well. The observation holds height, direction, velocity, roll and pitch; then angle and speed of each joint;
    then which of `feet` touched the ground one step ago.

    As for Gymnasium, a checkpoint holds the number of the episode, which seeds it together with `seed`, and the
    actions taken in it, which are played again.

    >>> simulator = HalfCheetah(seed=0)
    >>> simulator.reset().shape, simulator.action_size, simulator.time_limit
    ((26,), 6, 1000)
    """

    model = ""
    power = 1.0
    strengths: ClassVar[dict[str, float]] = {}  # of the motors that differ from 100
    feet: tuple[str, ...] = ()
    terminates = True
    time_limit = 1000
    num_actions: int | None = None

    def __init__(self, seed: int, *, render: bool = False) -> None:
        name = f"pybullet/{type(self).__name__}"
        self._bullet = optional_import("pybullet", name)
        self._models = Path(optional_import("pybullet_data", name).getDataPath())
        self._client = self._bullet.connect(self._bullet.DIRECT)
        self._disconnect = weakref.finalize(self, self._bullet.disconnect, self._client)
        self._load()
        self.action_size = len(self._joints)
        self.action_low, self.action_high = (np.full(self.action_size, x, np.float32) for x in (-1, 1))
        self.observation_size = 8 + 2 * self.action_size + len(self.feet)
        self._render = render
        self._rotation, self._distance = np.eye(3), 0.0
        self._seed, self._episode, self._actions = seed, -1, list[np.ndarray]()
        # The state that episodes start from holds a first start, as it does in the original.
        self._place_joints(0)
        self._first_state = self._call("saveState")()

    def _well(self, height: float, pitch: float) -> bool:
        """Whether the robot is rewarded for its posture; otherwise the episode ends."""
        raise NotImplementedError

    def _call(self, function: str, *arguments: Any, **options: Any) -> Any:
        """A function of PyBullet for this simulation, with its first arguments."""
        return partial(getattr(self._bullet, function), *arguments, physicsClientId=self._client, **options)

    def _set_engine(self) -> None:
        self._call("setGravity")(0, 0, -9.8)
        self._call("setDefaultContactERP")(0.9)
        self._call("setPhysicsEngineParameter")(
            fixedTimeStep=_INTERVAL, numSolverIterations=5, numSubSteps=_SUBSTEPS
        )

    def _load(self) -> None:
        """Load ground and robot, find joints and parts, and prepare the calls of a step."""
        bullet, call = self._bullet, self._call
        call("resetSimulation")()
        call("setPhysicsEngineParameter")(deterministicOverlappingPairs=1)
        self._set_engine()
        (ground,) = call("loadSDF")(str(self._models / "plane_stadium.sdf"))
        call("changeDynamics")(ground, -1, lateralFriction=0.8, restitution=0.5)
        call("changeVisualShape")(ground, -1, rgbaColor=[1, 1, 1, 0.8])
        flags = bullet.URDF_USE_SELF_COLLISION | bullet.URDF_USE_SELF_COLLISION_EXCLUDE_ALL_PARENTS
        (robot,) = call("loadMJCF")(
            str(self._models / "mjcf" / self.model), flags=flags | bullet.URDF_GOOGLEY_UNDEFINED_COLORS
        )
        self._joints, self._ranges, self._gains, parts = [], [], [], dict[str, int]()
        self._release = call(
            "setJointMotorControl2",
            robot,
            controlMode=bullet.POSITION_CONTROL,
            positionGain=0.1,
            velocityGain=0.1,
        )
        for joint in range(call("getNumJoints")(robot)):
            self._release(jointIndex=joint, force=0)
            info = call("getJointInfo")(robot, joint)
            name, lower, upper = info[1].decode(), info[8], info[9]
            parts[info[12].decode()] = joint
            parts.setdefault("torso", -1)  # the base, unless a later part has this name
            if not name.startswith(("ignore", "jointfix")):
                self._joints.append(joint)
                self._ranges.append((lower, upper - lower))
                self._gains.append(self.power * self.strengths.get(name, 100.0))
        self._torso_is_base = parts["torso"] < 0
        self._feet = [parts[foot] for foot in self.feet]
        self._ground_place = call("getBasePositionAndOrientation")(ground)[0]
        self._reset_joint = call("resetJointState", robot, targetVelocity=0)
        self._set_torques = call("setJointMotorControlArray", robot, self._joints, bullet.TORQUE_CONTROL)
        self._simulate = call("stepSimulation")
        self._joint_states = call("getJointStates", robot, self._joints)
        links = [part for part in parts.values() if part >= 0]
        self._link_states = call("getLinkStates", robot, links, computeLinkVelocity=not self._torso_is_base)
        self._base_pose = call("getBasePositionAndOrientation", robot)
        self._base_velocity = call("getBaseVelocity", robot)
        self._contacts = call("getContactPoints", robot, ground)

    def _place_joints(self, seed: int) -> None:
        angles = np.random.default_rng(seed).uniform(-0.1, 0.1, len(self._joints))
        for joint, angle in zip(self._joints, angles.tolist(), strict=True):
            self._reset_joint(jointIndex=joint, targetValue=angle)
            self._release(jointIndex=joint, targetPosition=0, targetVelocity=0, force=0)
        self._touching = [0.0] * len(self.feet)

    def reset(self) -> np.ndarray:
        """Start the next episode, seeded by its number."""
        self._episode += 1
        self._actions = []
        self._call("restoreState")(self._first_state)
        self._set_engine()
        seed = np.random.SeedSequence((self._seed, self._episode)).generate_state(1, np.uint32)[0]
        self._place_joints(int(seed))
        self._first_height = 0.0
        observation = self._observe()
        self._first_height, observation[0] = self._place[2], 0.0
        return observation.clip(-5, 5)

    def _observe(self) -> np.ndarray:
        """The observation before it is clipped; remembers pitch, place and distance to the target."""
        links = self._link_states()
        places = [link[0] for link in links]
        if self._torso_is_base:
            place, orientation = self._base_pose()
            velocity = self._base_velocity()[0]
            places.insert(1, place)
        else:
            place, orientation, *_, (x_speed, _, z_speed), spin = links[1]
            velocity = x_speed, spin[2], z_speed  # so it is in the original
        places.append(self._ground_place)
        x = float(np.add.reduce([p[0] for p in places])) / len(places)
        y = float(np.add.reduce([p[1] for p in places])) / len(places)
        height = place[2]
        roll, self._pitch, yaw = self._bullet.getEulerFromQuaternion(orientation)
        towards = np.array([0 - y, _TARGET - x])
        self._distance = math.sqrt(towards.dot(towards))
        angle = np.arctan2(0 - y, _TARGET - x) - yaw
        cosine, sine, turn = np.cos(-yaw), np.sin(-yaw), self._rotation
        turn[0, 0], turn[0, 1], turn[1, 0], turn[1, 1] = cosine, -sine, sine, cosine
        vx, vy, vz = turn.dot(velocity).tolist()
        out = [height - self._first_height, np.sin(angle), np.cos(angle), 0.3 * vx, 0.3 * vy, 0.3 * vz]
        out += roll, self._pitch
        for (position, speed, _, _), (lower, width) in zip(self._joint_states(), self._ranges, strict=True):
            out += 2 * (position - lower) / width - 1.0, 0.1 * speed
        self._place = place
        return np.array(out + self._touching, np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """One control step; raises RuntimeError when the action is not finite."""
        check_begun(self._episode >= 0)
        kept = action_vector(action, self.action_size).astype(np.float32)
        values = kept.tolist()
        if not math.isfinite(sum(values)):
            raise RuntimeError(f"action must be finite, got {kept!r} at step {len(self._actions)}")
        self._actions.append(kept)
        torques = [gain * min(max(a, -1.0), 1.0) for gain, a in zip(self._gains, values, strict=True)]
        self._set_torques(forces=torques)
        before = self._distance
        self._simulate()
        raw = self._observe()
        observation = raw.clip(-5, 5)
        well = self._well(float(observation[0]) + self._first_height, self._pitch)
        progress = -self._distance / _INTERVAL - -before / _INTERVAL
        touched = {contact[3] for contact in self._contacts()}
        self._touching = [float(foot in touched) for foot in self._feet]
        joints = raw[8 : 8 + 2 * self.action_size]
        effort = -2.0 * _mean(np.abs(kept * joints[1::2])) + -0.1 * _mean(kept * kept)
        at_limit = -0.1 * int(np.count_nonzero(np.abs(joints[::2]) > np.float32(0.99)))
        reward = sum([1.0 if well else -1.0, progress, effort, at_limit, 0.0])
        terminated = (self.terminates and not well) or math.isnan(observation.sum())
        return observation, reward, terminated, len(self._actions) >= self.time_limit

    def get_state(self) -> dict[str, Any]:
        """Seed, number of the episode and its actions."""
        actions = np.array(self._actions, np.float32).reshape(-1, self.action_size)
        return {"episode": self._episode, "actions": actions, "seed": self._seed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Start the episode again and play its actions."""
        self._seed, self._episode = int(state["seed"]), max(int(state["episode"]) - 1, -1)
        if int(state["episode"]) >= 0:
            self.reset()
            for action in state["actions"]:
                self.step(action)

    def render(self) -> np.ndarray:
        """The robot from the side by PyBullet's own renderer, `[240, 320, 3]`; needs `make(…, render=True)`."""
        if not self._render:
            raise RuntimeError("the simulator must be made with render=True to be drawn")
        bullet = self._bullet
        view = bullet.computeViewMatrixFromYawPitchRoll(self._place, 3, 0, -30, 0, 2)
        projection = bullet.computeProjectionMatrixFOV(60, 320 / 240, 0.1, 100.0)
        pixels = self._call("getCameraImage")(320, 240, view, projection)[2]
        return np.reshape(np.asarray(pixels, np.uint8), (240, 320, 4))[:, :, :3]

    def close(self) -> None:
        """Free the simulation."""
        self._disconnect()


def _mean(numbers: np.ndarray) -> float:
    """The mean, rounded to float32 as NumPy does, at a third of its cost."""
    return float(np.float32(float(np.add.reduce(numbers)) / len(numbers)))


class HalfCheetah(PyBulletTask):
    """Run; episodes last for 1,000 steps, and lying on shins or thighs costs reward."""

    model, power = "half_cheetah.xml", 0.9
    strengths: ClassVar = {
        "bthigh": 120.0,
        "bshin": 90.0,
        "bfoot": 60.0,
        "fthigh": 140.0,
        "fshin": 60.0,
        "ffoot": 30.0,
    }
    feet = ("ffoot", "fshin", "fthigh", "bfoot", "bshin", "bthigh")
    terminates = False

    def _well(self, height: float, pitch: float) -> bool:
        _, shin, thigh, _, other_shin, other_thigh = self._touching
        return abs(pitch) < 1.0 and not (shin or thigh or other_shin or other_thigh)


class Ant(PyBulletTask):
    """Walk on four legs, until the body lies on the ground."""

    model, power = "ant.xml", 2.5
    feet = ("front_left_foot", "front_right_foot", "left_back_foot", "right_back_foot")

    def _well(self, height: float, pitch: float) -> bool:
        return height > 0.26


class Hopper(PyBulletTask):
    """Hop on one leg, until it falls."""

    model, power = "hopper.xml", 0.75
    feet: tuple[str, ...] = ("foot",)

    def _well(self, height: float, pitch: float) -> bool:
        return height > 0.8 and abs(pitch) < 1.0


class Walker2D(Hopper):
    """Walk on two legs, until it falls."""

    model, power = "walker2d.xml", 0.40
    feet = ("foot", "foot_left")
    strengths: ClassVar = {"foot_joint": 30.0, "foot_left_joint": 30.0}


TASKS: dict[str, type[PyBulletTask]] = {c.__name__: c for c in (Ant, HalfCheetah, Hopper, Walker2D)}
