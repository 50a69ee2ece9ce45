"""Every setting of the TD3 agent, each with a sentence; the defaults are Spinning Up's."""

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any, Literal

Operator = Literal["one-step", "n-step", "retrace", "retrace-paper", "marginalized"]
Weights = Literal["saddle-point", "fenchel", "regression"]
Normalisation = Literal["none", "mean", "power"]
LaterSteps = Literal["all", "one"]


@dataclass(frozen=True, kw_only=True)
class TD3Config:
    """Settings of the agent; wrong ones raise `ValueError` at once.

    Actions are scaled to the box [-1, 1] inside the agent, so noise scales are fractions of half the range of
    an action (for simulators with actions in [-1, 1], Spinning Up's numbers as they are).

    >>> TD3Config(operator="retrace").sequence_length
    5
    >>> TD3Config(discount=1.5)
    Traceback (most recent call last):
        ...
    ValueError: discount must lie in [0, 1), got 1.5.
    """

    operator: Operator = "one-step"
    """The operator whose sampled estimate is the critic's target."""
    weights: Weights = "regression"
    """How `marginalized` estimates its TD weights."""
    sequence_length: int = 5
    """Steps of a replayed sequence; `one-step` needs, and takes, only 1."""
    later_steps: LaterSteps | None = None
    """Which steps after the first a `marginalized` target reads: `all` of the sequence, or `one` drawn at random,
    which costs about as much as two one-step targets whatever the length, and is a little noisier. None: `one` for
    `regression`, which learned as well that way, and `all` for the others, which need all."""
    decay: float = 0.7
    """λ of the traces λ min(1, (π/μ)^temperature); not used by `n-step`."""
    trace_temperature: float = 1.0
    """Power of the ratio π/μ in the traces: 1 is the paper's, less is softer."""
    trace_scale: float | None = None
    """Standard deviation of π around the actor's output; None: that of the exploration."""
    start_conditioned: bool = True
    """Whether the TD weights see the start pair (x_0, a_0) as well as (x_t, a_t)."""
    exact_first_weight: bool = True
    """Whether start-conditioned weights are 1 at the start itself, as they are where no state is met twice."""
    normalisation: Normalisation = "none"
    """What is done to the weights of a batch: `none`; `mean`: divided by their mean; `power`, the paper's: raised to
    `normalisation_power`, then divided by their mean. It makes all credits nearly equal."""
    normalisation_power: float = 0.1
    """The paper's T."""
    weight_learning_rate: float = 1e-4
    """Adam's step size for the TD weights w."""
    weight_critic_learning_rate: float = 1e-3
    """Adam's step size for the weights' adversary."""
    weight_critic_penalty: float = 1.0
    """Factor of half the square of `saddle-point`'s critic before its tanh: it keeps the tanh from saturating and
    leaves the solution as it is. 0 is the paper's."""
    discount: float = 0.99
    """γ."""
    polyak: float = 0.995
    """Share of the old target networks kept at each update of them."""
    learning_rate: float = 1e-3
    """Adam's step size for actor and critics."""
    batch_size: int = 100
    """Sequences in a batch."""
    hidden: tuple[int, ...] = (256, 256)
    """Hidden units of each layer of every network."""
    act_noise: float = 0.1
    """Standard deviation of the exploration noise."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions."""
    noise_clip: float = 0.5
    """Largest absolute value of that noise."""
    policy_delay: int = 2
    """One update of the actor, the targets and the TD weights for so many of the critics: the last of them."""
    random_steps: int = 10_000
    """First steps, which take uniform random actions."""
    update_after: int = 1_000
    """Steps before the first update."""
    update_every: int = 50
    """Steps between blocks of updates; a block has as many updates."""
    replay_size: int = 1_000_000
    """Transitions the replay buffer holds; the oldest go first."""
    divergence: float = 100.0
    """A seed ends when its mean |Q| exceeds this many times the largest |reward| met over 1 - γ."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("operator", Operator),
            ("weights", Weights),
            ("normalisation", Normalisation),
            ("later_steps", LaterSteps),
        ):
            value = getattr(self, name)
            choices = typing.get_args(allowed)
            if value not in choices and not (name == "later_steps" and value is None):
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
        for name in ("sequence_length", "batch_size", "policy_delay", "update_every", "replay_size"):
            _require(getattr(self, name) >= 1, name, "be at least 1", getattr(self, name))
        for name in ("random_steps", "update_after", "target_noise", "noise_clip", "weight_critic_penalty"):
            _require(_finite(getattr(self, name)) >= 0, name, "be at least 0", getattr(self, name))
        for name in (
            "learning_rate",
            "weight_learning_rate",
            "weight_critic_learning_rate",
            "act_noise",
            "normalisation_power",
            "divergence",
        ):
            _require(_finite(getattr(self, name)) > 0, name, "be above 0", getattr(self, name))
        _require(0 <= self.discount < 1, "discount", "lie in [0, 1)", self.discount)
        for name in ("polyak", "decay", "trace_temperature"):
            _require(0 <= getattr(self, name) <= 1, name, "lie in [0, 1]", getattr(self, name))
        scale = self.trace_scale
        _require(scale is None or _finite(scale) > 0, "trace_scale", "be above 0", scale)
        layers = self.hidden
        _require(len(layers) > 0 and min(layers) >= 1, "hidden", "have layers of at least 1 unit", layers)
        for name in ("sequence_length", "batch_size", "update_every"):
            value = getattr(self, name)
            _require(value <= self.replay_size, name, f"not exceed replay_size {self.replay_size}", value)

        if self.later_steps == "one" and self.weights != "regression":
            raise ValueError(f"later_steps must be 'all' for weights {self.weights!r}, got 'one'.")

    @property
    def samples_a_step(self) -> bool:
        """Whether a target reads its first step and one other alone.

        >>> TD3Config(operator="marginalized").samples_a_step
        True
        >>> TD3Config(operator="marginalized", weights="saddle-point").samples_a_step
        False
        """
        one = self.weights == "regression" if self.later_steps is None else self.later_steps == "one"
        return self.operator == "marginalized" and one and self.sequence_length > 1

    @property
    def length(self) -> int:
        """Steps of a sequence that the operator needs.

        >>> TD3Config(operator="one-step", sequence_length=5).length
        1
        """
        return 1 if self.operator == "one-step" else self.sequence_length

    @property
    def policy_scale(self) -> float:
        """Standard deviation of π around the actor's output."""
        return self.act_noise if self.trace_scale is None else self.trace_scale

    @property
    def label(self) -> str:
        """A short name for legends.

        >>> TD3Config(operator="marginalized").label
        'marginalized-regression'
        """
        return f"marginalized-{self.weights}" if self.operator == "marginalized" else self.operator

    def to_json(self) -> dict[str, Any]:
        """The settings as plain data; `from_json` reads them back.

        >>> TD3Config.from_json(TD3Config(discount=0.9).to_json()).discount
        0.9
        """
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TD3Config":
        """Settings from plain data; unknown names raise `ValueError`."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"{unknown[0]!r} is not a setting of the agent.")
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**settings)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _finite(value: float | int) -> float | int:
    return value if math.isfinite(value) else math.nan


def _require(condition: bool, name: str, should: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"{name} must {should}, got {value!r}.")
