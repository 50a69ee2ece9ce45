"""Metrics of an update of the critics, and the variance that the targets of other operators have on the same batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from marginax.deep.config import AgentConfig
from marginax.deep.critic_targets import CriticTarget, later, masked_mean
from marginax.deep.replay import Sequences


class Metrics(eqx.Module):
    """The metrics of one update, or of a block with one entry per update.

    Attributes:
        critic_loss: Mean squared error, summed over the twin critics.
        q_mean: Mean value of the first critic on the batch.
        q_size: Mean absolute value of the first critic.
        target_mean: Mean of the targets.
        target_variance: Variance of the targets over the batch.
        error_variance: Variance of target minus the first critic's value: a measure of the noise of the targets.
        trace_mean: Mean trace c(x_t, a_t) over steps t ≥ 1; 0 without such steps.
        weight_mean: Mean credit of the steps t ≥ 1.
        weight_max: Largest credit of any step.
        effective_length: Sum of the credits of a sequence, averaged over sequences; 1 for `one-step`.
        weight_loss: Loss of the TD weights; 0 in updates that do not train them.
    """

    critic_loss: Float[Array, "..."]
    q_mean: Float[Array, "..."]
    q_size: Float[Array, "..."]
    target_mean: Float[Array, "..."]
    target_variance: Float[Array, "..."]
    error_variance: Float[Array, "..."]
    trace_mean: Float[Array, "..."]
    weight_mean: Float[Array, "..."]
    weight_max: Float[Array, "..."]
    effective_length: Float[Array, "..."]
    weight_loss: Float[Array, "..."]


# Other operators, the variance of whose targets is measured on the same batches and networks.
RIVALS = ("one-step", "retrace")
METRICS = (
    *(field.name for field in dataclasses.fields(Metrics)),
    *(f"error_variance_{name}" for name in RIVALS),
)


def update_metrics(found: CriticTarget, loss: Array, values: Array, weight_loss: Float[Array, ""]) -> Metrics:
    """Metrics with one entry per batch.

    Args:
        found: The targets of a round.
        loss: Critic losses `[batches]`.
        values: The first critic's values `[batches, batch]`.
        weight_loss: Loss of the TD weights, which are trained on the last batch.
    """
    return Metrics(
        critic_loss=loss,
        q_mean=jnp.mean(values, axis=1),
        q_size=jnp.mean(jnp.abs(values), axis=1),
        target_mean=jnp.mean(found.target, axis=1),
        target_variance=jnp.var(found.target, axis=1),
        error_variance=jnp.var(found.target - values, axis=1),
        trace_mean=found.trace_mean,
        weight_mean=jax.vmap(masked_mean)(later(found.valid), found.credit),
        weight_max=jnp.max(found.credit, axis=(1, 2)),
        effective_length=jnp.mean(jnp.sum(found.credit / found.share, axis=1), axis=1),
        weight_loss=jnp.zeros_like(loss).at[-1].set(weight_loss),
    )


def measured(
    config: AgentConfig,
    own: Metrics,
    values: Float[Array, " batch"],
    batch: Sequences,
    targets_of: Callable[[Any, Sequences], CriticTarget],
) -> Float[Array, " metrics"]:
    """`METRICS` of one batch: those of the update, and the variances of target minus value for `RIVALS`.

    Args:
        config: The settings of the agent.
        own: Metrics of the update on this batch.
        values: The first critic's values.
        batch: The batch.
        targets_of: Computes the targets that other settings have on a round of a single batch.
    """
    variances = []
    for name in RIVALS:
        rival = dataclasses.replace(config, operator=name)
        if config.length < rival.length:  # the sequences are too short for this operator
            variances.append(jnp.full((), jnp.nan))
            continue
        one: Sequences = jax.tree.map(lambda x, n=rival.length: x[None, :n], batch)
        variances.append(jnp.var(targets_of(rival, one).target[0] - values))
    return jnp.stack([*(getattr(own, field.name)[0] for field in dataclasses.fields(Metrics)), *variances])
