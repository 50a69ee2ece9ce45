"""A population in the files of its folder: policies, metrics, and a checkpoint from which training carries on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from marginax.deep import checkpoint, learner_files
from marginax.deep.checkpoint import CHECKPOINT
from marginax.deep.policy import Policy, policy_name
from marginax.simulators.policy import unpack

if TYPE_CHECKING:
    from marginax.deep.metrics import MetricsLog
    from marginax.deep.population import Population


def save(population: Population, log: MetricsLog, *, replay: bool) -> None:
    """Write the policies and a checkpoint between two blocks.

    Args:
        population: What is saved.
        log: Its metrics so far, in the same folder.
        replay: Whether the replay buffers are saved.
    """
    folder, config, step = log.folder, population.config, population.step
    monitor, timing = population.monitor, population.timing
    for vector, (label, seed) in zip(population.newest, config.agents, strict=True):
        scale = getattr(config.groups[label], "act_noise", 0.0)
        layers = unpack(vector, population.layer_sizes)
        policy = Policy(layers, *population.action_bounds, scale, config.played)
        policy.save(folder / policy_name(label, seed))
    known = checkpoint.manifest(folder / CHECKPOINT) or {"files": []}
    files: dict[str, dict[str, Any]] = {}
    keep: list[str] = []
    for number, learner in enumerate(population.learners):
        new, kept = learner_files.to_files(
            number,
            learner,
            step=step,
            saved_until=population.saved_until,
            known=known["files"],
            replay=replay,
        )
        files |= new
        keep += kept
    files[f"population-{step}"] = {
        "_acting": population.acting,
        "_newest": population.newest,
        "_largest_reward": monitor.largest_reward,
        "_returns": monitor.returns,
    }
    files[f"simulators-{step}"] = {
        f"{agent}/{name}": value
        for agent, state in enumerate(population.pool.get_state())
        for name, value in state.items()
    }
    meta = {
        "config": config.to_json(),
        "step": step,
        "seconds": population.seconds,
        "replay": replay,
        "metrics": log.known(),
        "failures": {str(agent): failure for agent, failure in monitor.failures.items()},
        "learned": monitor.learned,
        "finished_returns": monitor.finished_returns,
        "timing": {**dataclasses.asdict(timing), "busy": timing.busy},
        "replaced_workers": population.pool.replaced,
        "platform": checkpoint.platform(),
    }
    checkpoint.save(folder / CHECKPOINT, meta, files, keep)


def resume(population: Population, log: MetricsLog) -> None:
    """Put a fresh population where the last checkpoint was, and forget what was logged after it.

    Of a population that is finished only the step, the failures and the metrics are read. Where there is no checkpoint,
    a first one without files claims the folder.

    Raises:
        ValueError: If the folder holds another population, or one that cannot go on.
    """
    found = checkpoint.load(log.folder / CHECKPOINT)
    if found is None:
        log.start(None)
        first = {"config": population.config.to_json(), "step": 0, "failures": {}}
        checkpoint.save(log.folder / CHECKPOINT, first, {})
        return
    meta, files = found
    population.config.require_same(meta["config"], log.folder)
    population.lines = log.start(meta.get("metrics", {"bytes": 0}))
    monitor = population.monitor
    population.step, population.seconds = meta["step"], meta.get("seconds", 0.0)
    monitor.failures = {int(agent): failure for agent, failure in meta["failures"].items()}
    if population.finished or population.step == 0:
        return
    if not meta["replay"]:
        raise ValueError(
            f"the run in {str(log.folder)!r} ended at step {meta['step']} without its replay buffers and "
            "cannot go on: choose another folder."
        )
    population.saved_until = population.step
    arrays = files[f"population-{population.step}"]
    population.acting, population.newest = arrays["_acting"], arrays["_newest"]
    monitor.largest_reward, monitor.returns = arrays["_largest_reward"], arrays["_returns"]
    monitor.learned, monitor.finished_returns = meta["learned"], meta["finished_returns"]
    for number, learner in enumerate(population.learners):
        learner.state = learner_files.from_files(number, learner, files, population.step)
    states: list[dict[str, Any]] = [{} for _ in population.config.agents]
    for name, value in files[f"simulators-{population.step}"].items():
        agent, _, key = name.partition("/")
        states[int(agent)][key] = value
    population.pool.set_state(states)
