"""The settings of agents with discrete actions, each with a sentence."""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from marginax.deep.config import AgentConfig, Weights

DiscreteOperator = Literal["one-step", "n-step", "peng", "tree-backup", "retrace", "marginalized"]
ValueOperator = Literal["vtrace", "marginalized"]
TargetPolicy = Literal["greedy", "epsilon-greedy", "softmax"]


@dataclass(frozen=True, kw_only=True)
class DiscreteConfig(AgentConfig):
    """What agents with discrete actions have in common."""

    environments: int = 1
    """Copies of the simulator that an agent plays side by side. A block's steps are shared among them."""
    block_updates: int | None = None
    """Updates of a block; None: a tenth of its steps, at least 1."""
    epsilon_steps: int | None = 0
    """Steps over which exploration falls from uniform actions."""
    filters: int | None = None
    """Filters of a 3 × 3 convolution before the hidden layers; None: 16 for observations `[rows, columns, planes]`."""

    discrete: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("environments", "block_updates"):
            self._require(name, lambda x: x >= 1, "be at least 1")
        for name in ("filters", "epsilon_steps"):
            self._require(name, lambda x: x >= 0, "be at least 0")
        if self.update_every % self.environments:
            raise ValueError(
                f"update_every must be a multiple of environments {self.environments}, got {self.update_every}."
            )

    @property
    def updates(self) -> int:
        """Updates of a block."""
        return self.block_updates or max(1, self.update_every // 10)

    @property
    def copies(self) -> int:
        """Simulators that an agent plays side by side."""
        return self.environments

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The last ε of each environment: none for a policy that explores by itself."""
        return (0.0,) * self.environments


@dataclass(frozen=True, kw_only=True)
class QConfig(DiscreteConfig):
    """Settings of Q-learning, by default those of cleanrl's `dqn_jax`; wrong ones raise `ValueError` at once.

    >>> QConfig(operator="retrace", environments=4, update_every=8, ladder=7.0, epsilon=0.4).epsilons[-1] < 0.001
    True
    """

    operator: DiscreteOperator = "one-step"
    """The operator whose sampled estimate is the target of Q."""
    sequence_length: int = 8
    """Steps of a replayed sequence; `one-step` needs, and takes, only 1."""
    decay: float = 0.9
    """λ of the traces; `n-step` has none."""
    hidden: tuple[int, ...] = (120, 84)
    """Hidden units of each layer of every network."""
    learning_rate: float = 2.5e-4
    """Adam's step size for Q."""
    batch_size: int = 128
    """Sequences in a batch."""
    update_after: int = 10_000
    """Steps before the first update."""
    update_every: int = 10
    """Steps of a block, all with one policy; then come its updates."""
    replay_size: int = 10_000
    """Transitions the replay buffer holds, rounded down to whole blocks; the oldest are overwritten first."""
    random_steps: int | None = 0
    """First steps, which take uniform random actions. None: 10,000, but at most a tenth of the run."""
    double: bool = True
    """Whether the target policy takes its best action by the learned Q, and its value from the target network."""
    target_every: int = 50
    """Updates between copies of Q to the target network."""
    target_policy: TargetPolicy = "greedy"
    """π: greedy in Q, greedy with probability 1 - `target_epsilon`, or softmax of Q / `temperature`."""
    target_epsilon: float = 0.05
    """Share of uniform actions of the target policy `epsilon-greedy`."""
    temperature: float = 0.1
    """Temperature of the target policy `softmax`."""
    epsilon: float = 0.05
    """Share of uniform actions in the behaviour policy, once it has fallen to it."""
    epsilon_steps: int | None = None
    """Steps over which that share falls from 1; None: half of the run."""
    ladder: float = 0.0
    """Environment i of E explores with ε^(1 + ladder · i / (E - 1)): 0 is the same for all, Ape-X has 7 (and ε = 0.4)."""

    kind: ClassVar[str] = "q-learning"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_epsilon", "epsilon"):
            self._require(name, lambda x: 0 < x <= 1, "lie in (0, 1]")
        self._require("temperature", lambda x: 0 < x < math.inf, "be above 0 and finite")
        self._require("target_every", lambda x: x >= 1, "be at least 1")
        self._require("ladder", lambda x: 0 <= x < math.inf, "be at least 0 and finite")

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The last ε of each environment."""
        rungs = max(self.environments - 1, 1)
        return tuple(self.epsilon ** (1 + self.ladder * i / rungs) for i in range(self.environments))

    def derived(self, steps: int) -> "QConfig":
        """The settings with what depends on the steps of the run filled in."""
        ready = super().derived(steps)
        if self.epsilon_steps is not None:
            return ready
        return dataclasses.replace(ready, epsilon_steps=steps // 2)


_WITHOUT_EFFECT = (
    *("weights", "start_conditioned", "exact_first_weight", "normalisation", "normalisation_power"),
    *("weight_critic_learning_rate", "weight_critic_penalty"),
)
"""Settings of TD weights that the actor-critic has no use for: its weights are u of two states."""


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(DiscreteConfig):
    """Settings of the actor-critic with V-trace; wrong ones raise `ValueError` at once.

    >>> ActorCriticConfig(environments=8, update_every=64)
    Traceback (most recent call last):
        ...
    ValueError: update_every must be at least environments times sequence_length, 128, got 64.
    """

    operator: ValueOperator = "vtrace"
    """The operator whose sampled estimate is the target of V and of the policy gradient."""
    weights: Weights = "paths"
    """`marginalized` learns the mean product of the traces between two states; there is no other estimator here."""
    sequence_length: int = 16
    """Steps of a sequence; every one of them is learned from."""
    decay: float = 1.0
    """λ of the traces λ min(c̄, π/μ)."""
    rho_clip: float = 1.0
    """Largest ratio π/μ in front of an error, V-trace's ρ̄."""
    replay_share: float = 0.5
    """Share of a batch's sequences that comes from replay; the others are of the last block."""
    actor_delay: int = 1
    """Updates between copies of the network to the one that acts: more are staler actors."""
    entropy: float = 0.01
    """Factor of the policy's entropy."""
    value_factor: float = 0.5
    """Factor of the squared error of V."""
    gradient_clip: float = 1.0
    """Largest norm of a gradient."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    hidden: tuple[int, ...] = (64, 64)
    """Hidden units of each layer of every network."""
    environments: int = 8
    """Copies of the simulator that an agent plays side by side. A block's steps are shared among them."""
    update_every: int = 128
    """Steps of a block, all with one policy; then come its updates."""
    block_updates: int | None = 4
    """Updates of a block; None: a tenth of its steps, at least 1."""
    batch_size: int = 16
    """Sequences in a batch."""
    replay_size: int = 12_800
    """Transitions the replay buffer holds, rounded down to whole blocks; the oldest are overwritten first."""
    random_steps: int | None = 0
    """First steps, which take uniform random actions. None: 10,000, but at most a tenth of the run."""

    kind: ClassVar[str] = "actor-critic"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rho_clip", "gradient_clip"):
            self._require(name, lambda x: 0 < x < math.inf, "be above 0 and finite")
        for name in ("entropy", "value_factor"):
            self._require(name, lambda x: 0 <= x < math.inf, "be at least 0 and finite")
        self._require("replay_share", lambda x: 0 <= x <= 1, "lie in [0, 1]")
        self._require("actor_delay", lambda x: x >= 1, "be at least 1")
        for name in _WITHOUT_EFFECT:
            only = type(self).__dataclass_fields__[name].default
            self._require(name, lambda x, only=only: x == only, f"be {only!r} for this agent")
        least = self.environments * self.sequence_length
        if self.update_every < least:
            raise ValueError(
                f"update_every must be at least environments times sequence_length, {least}, got {self.update_every}."
            )

    @property
    def length(self) -> int:
        """Steps of a sequence."""
        return self.sequence_length
