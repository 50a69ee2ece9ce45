"""The settings that all agents share, and those of TD3."""

import dataclasses
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from marginax._checks import choice, whole

Operator = Literal["one-step", "n-step", "retrace", "retrace-paper", "marginalized"]
Weights = Literal["saddle-point", "fenchel", "regression", "paths"]
Normalisation = Literal["none", "mean", "power"]
TargetSteps = Literal["all", "one"]
C = TypeVar("C", bound="AgentConfig")


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of every agent; wrong ones raise `ValueError` at once."""

    operator: str = "one-step"
    """The operator whose sampled estimate is the critic's target."""
    weights: Weights = "regression"
    """How `marginalized` estimates its TD weights; `paths` learns the mean product of the traces on the way to a state, and uses the exact last trace."""
    sequence_length: int = 5
    """Steps of a replayed sequence; `one-step` always takes 1."""
    decay: float = 0.7
    """λ of the traces λ min(c̄, (π/μ)^temperature); not used by `n-step`."""
    clip: float = 1.0
    """c̄ of the traces. TD weights are bounded by max(1, λ c̄)^(sequence_length - 1), as products of traces are."""
    start_conditioned: bool = True
    """Whether the TD weights see the start pair (x_0, a_0) as well as (x_t, a_t)."""
    exact_first_weight: bool = True
    """Whether start-conditioned weights are 1 at the start pair, the exact value if no state is met twice."""
    normalisation: Normalisation = "none"
    """How the weights of a batch are normalised: `mean` divides them by their mean; `power`, the paper's form, first raises them to `normalisation_power`."""
    normalisation_power: float = 0.1
    """The paper's T."""
    weight_learning_rate: float = 1e-4
    """Adam's step size for the TD weights w."""
    path_power: float = 1.0
    """Which deviance `paths` minimises: 0 is squares, 1 Poisson, 2 gamma."""
    path_mixture: float = 0.8
    """What `paths` learns from: 1 is products of traces, 0 is reverse-time TD."""
    weight_critic_learning_rate: float = 1e-3
    """Adam's step size for the adversary of the TD weights."""
    weight_critic_penalty: float = 1.0
    """Factor of half the squared output of `saddle-point`'s critic before its tanh, a penalty that keeps the tanh from saturating; 0 is the paper's."""
    discount: float = 0.99
    """γ."""
    learning_rate: float = 3e-4
    """Adam's step size for the policy and value networks."""
    batch_size: int = 256
    """Sequences in a batch."""
    hidden: tuple[int, ...] = (256, 256)
    """Hidden units of each layer of every network."""
    random_steps: int | None = None
    """Steps at the start with uniform random actions. None: 10,000, but at most a tenth of the run."""
    update_after: int = 1_000
    """Steps before the first update."""
    update_every: int = 50
    """Steps between blocks of updates; a block has as many updates as steps."""
    replay_size: int = 1_000_000
    """Transitions the replay buffer holds, rounded down to whole blocks; the oldest are overwritten first."""
    time_limits_end: bool = False
    """Whether a time limit counts as the end of an episode, with no reward after it; otherwise targets bootstrap there."""
    divergence_factor: float = 100.0
    """A seed stops when its mean |Q| exceeds this factor times the largest |reward| so far, divided by 1 - γ."""

    kind: ClassVar[str]
    """The agent's name on the command line and in files."""
    discrete: ClassVar[bool]
    """Whether the agent chooses among discrete actions."""
    before: ClassVar[dict[str, Any]] = {}
    """Values that stored runs had before a setting existed, where they differ from its default."""

    def __post_init__(self) -> None:
        as_plain(self)
        for name, kind in typing.get_type_hints(type(self)).items():
            choices, value = _choices(kind), getattr(self, name, None)
            may_be_none = type(None) in typing.get_args(kind)
            if choices and value not in choices and not (may_be_none and value is None):
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
        for name in ("sequence_length", "batch_size", "update_every", "replay_size"):
            self._require(name, lambda x: x >= 1, "be at least 1")
        for name in ("random_steps", "update_after", "weight_critic_penalty"):
            self._require(name, lambda x: 0 <= x < math.inf, "be at least 0 and finite")
        positive = ("learning_rate", "weight_learning_rate", "weight_critic_learning_rate")
        for name in (*positive, "normalisation_power", "divergence_factor", "clip"):
            self._require(name, lambda x: 0 < x < math.inf, "be above 0 and finite")
        self._require("discount", lambda x: 0 <= x < 1, "lie in [0, 1)")
        self._require("path_power", lambda x: 0 <= x <= 2, "lie in [0, 2]")
        for name in ("decay", "path_mixture"):
            self._require(name, lambda x: 0 <= x <= 1, "lie in [0, 1]")
        self._require("hidden", lambda x: len(x) > 0 and min(x) >= 1, "have layers of at least 1 unit")
        for name in ("sequence_length", "batch_size", "update_every"):
            self._require(name, lambda x: x <= self.replay_size, f"not exceed replay_size {self.replay_size}")

    def _require(self, name: str, holds: Any, should: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):  # None stands for a default that depends on other settings
            raise ValueError(f"{name} must {should}, got {value!r}.")

    @property
    def length(self) -> int:
        """Steps of the sequences that the operator reads."""
        return 1 if self.operator == "one-step" else self.sequence_length

    @property
    def updates(self) -> int:
        """Number of updates in a block."""
        return self.update_every

    @property
    def copies(self) -> int:
        """Number of simulators that an agent plays side by side."""
        return 1

    @property
    def weight_bound(self) -> float:
        """The largest product of traces of a sequence, and so the largest TD weight."""
        return max(1.0, self.decay * self.clip) ** (self.sequence_length - 1)

    @property
    def label(self) -> str:
        """A short name for legends."""
        return f"marginalized-{self.weights}" if self.operator == "marginalized" else self.operator

    def derived(self: C, steps: int) -> C:
        """The settings with the defaults that depend on the length of the run filled in."""
        most = min(10_000, steps // 10)
        return self if self.random_steps is not None else dataclasses.replace(self, random_steps=most)

    def to_json(self) -> dict[str, Any]:
        """The settings as plain data; `from_json` reads them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls: type[C], data: dict[str, Any]) -> C:
        """Settings from plain data; unknown names raise `ValueError`."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"{unknown[0]!r} is not a setting of the agent.")
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**{**cls.before, **settings})


def as_plain(settings: Any) -> None:
    """Turn the fields of a new frozen dataclass into Python's own numbers and tuples.

    Then settings can be hashed, stored and compared with stored ones, whatever types they were given as.
    """
    kinds = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = _plain(field.name, getattr(settings, field.name), kinds[field.name])
        object.__setattr__(settings, field.name, value)


def _plain(name: str, value: Any, kind: Any) -> Any:
    if hasattr(value, "tolist"):  # a NumPy or JAX array or number
        value = value.tolist()
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise ValueError(f"{name} must be a list of whole numbers, got {value!r}.")
        return tuple(_plain(name, each, int) for each in value)
    kinds = (kind, *typing.get_args(kind))
    if value is None and type(None) in kinds:
        return None
    if int in kinds:
        return whole(name, value)
    if float in kinds and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    if bool in kinds and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return value


def _choices(kind: Any) -> list[str]:
    """The words that a setting of this `Literal` type can take; empty for other types."""
    parts = (kind, *typing.get_args(kind))
    return [word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)]


@dataclass(frozen=True, kw_only=True)
class TD3Config(AgentConfig):
    """Settings of TD3; wrong ones raise `ValueError` at once.

    The defaults are Spinning Up's except for scaled observations, a penalty of saturated actions, larger batches, smaller
    steps of the actor and more exploration: see the page on the baseline. `preset` gives Spinning Up's own or the paper's.

    Actions are scaled to the box [-1, 1] inside the agent, so noise scales are fractions of half the range of an action.

    >>> TD3Config(operator="retrace").sequence_length
    5
    >>> TD3Config(discount=1.5)
    Traceback (most recent call last):
        ...
    ValueError: discount must lie in [0, 1), got 1.5.
    """

    operator: Operator = "one-step"
    """The operator whose sampled estimate is the critic's target."""
    target_steps: TargetSteps | None = None
    """Which later steps a `marginalized` target reads: `all`, or a random `one`, which is faster; None: `one` for `regression` without normalisation, else `all`."""
    trace_temperature: float = 1.0
    """Power of the ratio π/μ in the traces: 1 is the paper's; less brings traces closer to 1."""
    trace_scale: float | None = None
    """Standard deviation of π around the actor's output; None: that of the exploration noise."""
    learning_rate: float = 1e-3
    """Adam's step size for the critics."""
    actor_learning_rate: float | None = 3e-4
    """Adam's step size for the actor; None: that of the critics."""
    polyak: float = 0.995
    """Share of the old parameters that the target networks keep at each of their updates."""
    act_noise: float = 0.3
    """Standard deviation of the exploration noise."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions."""
    noise_clip: float = 0.5
    """Largest absolute value of the noise on the target policy's actions."""
    scale_observations: bool = True
    """Whether observations are scaled: minus their running mean, divided by their running standard deviation."""
    time_feature: bool = False
    """Whether observations contain the remaining share of the episode's time."""
    layer_norm: bool = False
    """Whether every hidden layer of the critics is scaled to mean 0 and variance 1 over its units."""
    actor_scale: float = 1.0
    """Factor of the initial parameters of the actor's last layer: with a small one, actions start near 0."""
    saturation_penalty: float = 0.01
    """Factor of a penalty in the actor's loss, the mean square of its output before the tanh. It keeps actions away from the bounds of the box."""
    actor_after: int = 0
    """Updates of the critics before the actor's first."""
    policy_delay: int = 2
    """Updates of the critics for one of the actor, the target networks and the TD weights."""

    kind: ClassVar[str] = "td3"
    discrete: ClassVar[bool] = False
    before: ClassVar[dict[str, Any]] = {
        "scale_observations": False,
        "saturation_penalty": 0.0,
        "actor_learning_rate": None,
    }

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "TD3Config":
        """The settings of a preset of `TD3_PRESETS` with some of them changed.

        >>> TD3Config.preset("spinning-up", operator="retrace").batch_size
        100
        """
        return cls(**{**TD3_PRESETS[choice("preset", name, TD3_PRESETS)], **changes})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("policy_delay", lambda x: x >= 1, "be at least 1")
        for name in ("target_noise", "noise_clip", "saturation_penalty", "actor_after"):
            self._require(name, lambda x: 0 <= x < math.inf, "be at least 0 and finite")
        for name in ("act_noise", "trace_scale", "actor_scale", "actor_learning_rate"):
            self._require(name, lambda x: 0 < x < math.inf, "be above 0 and finite")
        for name in ("polyak", "trace_temperature"):
            self._require(name, lambda x: 0 <= x <= 1, "lie in [0, 1]")
        if self.target_steps == "one":
            # A weight over the mean of the drawn steps' weights is not, on average, one over the mean of all.
            for name, needed in (("weights", "regression"), ("normalisation", "none")):
                if getattr(self, name) != needed:
                    raise ValueError(
                        f"target_steps must be 'all' for {name} {getattr(self, name)!r}, got 'one'."
                    )

    @property
    def samples_a_step(self) -> bool:
        """Whether a target reads only its first step and one random later step."""
        plain = self.weights == "regression" and self.normalisation == "none"
        one = plain if self.target_steps is None else self.target_steps == "one"
        return self.operator == "marginalized" and one and self.sequence_length > 1

    @property
    def actor_rate(self) -> float:
        """Adam's step size for the actor."""
        return self.learning_rate if self.actor_learning_rate is None else self.actor_learning_rate

    @property
    def policy_scale(self) -> float:
        """Standard deviation of π around the actor's output."""
        return self.act_noise if self.trace_scale is None else self.trace_scale


_SPINNING_UP: dict[str, Any] = {
    "scale_observations": False,
    "layer_norm": False,
    "saturation_penalty": 0.0,
    "batch_size": 100,
    "learning_rate": 1e-3,
    "actor_learning_rate": None,
    "act_noise": 0.1,
}
TD3_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "spinning-up": _SPINNING_UP,
    "paper": {
        **_SPINNING_UP,
        "operator": "marginalized",
        "weights": "saddle-point",
        "weight_critic_penalty": 0.0,
        "start_conditioned": False,
        "normalisation": "power",
    },
}
"""Presets of TD3, as changes of the defaults. The paper's agent is Spinning Up's with marginalized targets. Its TD weights
come from the saddle point, do not depend on the start pair, and have power normalisation."""
