"""The settings of agents with discrete actions: Q-learning and the actor-critic."""

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
    """Settings that all agents with discrete actions share."""

    environments: int = 1
    """Copies of the simulator that an agent plays side by side. They share the steps of a block."""
    block_updates: int | None = None
    """Number of updates in a block; None: a tenth of its steps, at least 1."""
    epsilon_steps: int | None = 0
    """Steps over which the share of uniform actions falls from 1 to its final value."""
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
        """Number of updates in a block."""
        return self.block_updates or max(1, self.update_every // 10)

    @property
    def copies(self) -> int:
        """Number of simulators that an agent plays side by side."""
        return self.environments

    @property
    def epsilons(self) -> tuple[float, ...]:
        """The final ε of each environment; 0 for a policy that explores by itself."""
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
    """Steps of a replayed sequence; `one-step` always takes 1."""
    decay: float = 0.9
    """λ of the traces; not used by `n-step`."""
    hidden: tuple[int, ...] = (120, 84)
    """Hidden units of each layer of every network."""
    learning_rate: float = 2.5e-4
    """Adam's step size for Q."""
    batch_size: int = 128
    """Sequences in a batch."""
    update_after: int = 10_000
    """Steps before the first update."""
    update_every: int = 10
    """Steps of a block. All are played with one policy; the updates of the block follow."""
    replay_size: int = 10_000
    """Transitions the replay buffer holds, rounded down to whole blocks; the oldest are overwritten first."""
    random_steps: int | None = 0
    """Steps at the start with uniform random actions. None: 10,000, but at most a tenth of the run."""
    double: bool = True
    """Double Q-learning: whether the target policy is computed from the online network; values come from the target network."""
    target_every: int = 50
    """Number of updates between two copies of Q to the target network."""
    target_policy: TargetPolicy = "greedy"
    """π: greedy in Q, greedy with probability 1 - `target_epsilon`, or softmax of Q / `temperature`."""
    target_epsilon: float = 0.05
    """Share of uniform actions of the target policy `epsilon-greedy`."""
    temperature: float = 0.1
    """Temperature of the target policy `softmax`."""
    epsilon: float = 0.05
    """Final share of uniform actions in the behaviour policy."""
    epsilon_steps: int | None = None
    """Steps over which the share of uniform actions falls from 1 to `epsilon`; None: half of the run."""
    ladder: float = 0.0
    """Environment i of E explores with ε^(1 + ladder · i / (E - 1)): 0 is the same ε for all, Ape-X has 7 (and ε = 0.4)."""

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
        """The final ε of each environment."""
        rungs = max(self.environments - 1, 1)
        return tuple(self.epsilon ** (1 + self.ladder * i / rungs) for i in range(self.environments))

    def derived(self, steps: int) -> "QConfig":
        """The settings with the defaults that depend on the length of the run filled in."""
        ready = super().derived(steps)
        if self.epsilon_steps is not None:
            return ready
        return dataclasses.replace(ready, epsilon_steps=steps // 2)


_WITHOUT_EFFECT = (
    *("weights", "start_conditioned", "exact_first_weight", "normalisation", "normalisation_power"),
    *("weight_critic_learning_rate", "weight_critic_penalty"),
)
"""Settings of TD weights that the actor-critic does not use: its weights are those of paths between states."""


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
    """How `marginalized` estimates its TD weights: only `paths`, the mean product of the traces between two states."""
    sequence_length: int = 16
    """Steps of a sequence. Every step of it has a target."""
    decay: float = 1.0
    """λ of the traces λ min(c̄, π/μ)."""
    rho_clip: float = 1.0
    """V-trace's ρ̄: the largest ratio π/μ that multiplies an error. Take at least c̄: with less, V-trace may not contract."""
    replay_share: float = 0.5
    """Share of a batch's sequences that is drawn from replay; the others come from the last block."""
    actor_delay: int = 1
    """Number of updates between two copies of the network to the acting one: more make the actor staler."""
    entropy: float = 0.01
    """Factor of the policy's entropy, which is maximised."""
    value_factor: float = 0.5
    """Factor of the squared error of V in the loss."""
    gradient_clip: float = 1.0
    """Largest global norm of the gradient."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    hidden: tuple[int, ...] = (64, 64)
    """Hidden units of each layer of every network."""
    environments: int = 8
    """Copies of the simulator that an agent plays side by side. They share the steps of a block."""
    update_every: int = 128
    """Steps of a block. All are played with one policy; the updates of the block follow."""
    block_updates: int | None = 4
    """Number of updates in a block; None: a tenth of its steps, at least 1."""
    batch_size: int = 16
    """Sequences in a batch."""
    replay_size: int = 12_800
    """Transitions the replay buffer holds, rounded down to whole blocks; the oldest are overwritten first."""
    random_steps: int | None = 0
    """Steps at the start with uniform random actions. None: 10,000, but at most a tenth of the run."""

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
