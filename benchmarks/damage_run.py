"""Damage every file of a training run in turn, and see whether it is noticed.

    python benchmarks/damage_run.py

A short run of `train` is stopped half-way (and another is finished). Then each of its files is, in turn, changed in one
byte (at several places), cut short, emptied and removed, and the run is carried on, plotted and played. Every
damage must be *harmless* (the run ends with the same metrics and policy as an undamaged one) or *named* (a
command ends with a sentence that names the file or its folder; `play` names the run's folder if it finds no policy).
"""

import contextlib
import dataclasses
import io
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import tyro

from marginax.deep import command
from marginax.deep.config import TD3Config
from marginax.deep.population import Population
from marginax.deep.run import open_run, run_metrics
from marginax.deep.run_config import PopulationConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is damaged."""

    flips: int = 8
    """Places of each file at which a byte is changed, besides the first and the last."""
    steps: int = 400
    seed: int = 0
    """Of the places."""


def config_of(steps: int) -> PopulationConfig:
    small = {"hidden": (8,), "batch_size": 8, "random_steps": 50, "update_after": 50, "replay_size": 200}
    agent = TD3Config(operator="marginalized", **small)
    return PopulationConfig(
        simulator="Pendulum-v1", groups={"td3": agent}, steps=steps, evaluate_every=100, episodes=1
    )


def train(folder: Path, config: PopulationConfig, until: int) -> None:
    """What `marginax train` does, in this process."""
    run = open_run(folder, config, together=False)
    ((name, part),) = run.parts.items()
    with Population(part, folder=folder / name) as population:
        if not population.finished:
            population.run(stop=lambda: population.step >= until)


def outcome(folder: Path, config: PopulationConfig) -> tuple[str, object]:
    """Carry a run on, plot it and play it: the sentence of an error, or what came out."""
    plots = Path(tempfile.mkdtemp())
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(folder, config, config.steps)
            command.plot((folder,), out=plots)
            command.play(folder, episodes=1)
        with np.load(next(folder.rglob("policy-*.npz"))) as arrays:
            policy = {name: arrays[name].tobytes() for name in arrays.files}
        return "", (run_metrics(folder), policy)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    finally:
        shutil.rmtree(plots)


def damages(content: bytes, given: Options, rng: random.Random) -> dict[str, list[bytes | None]]:
    """What a file may become; None: it is removed."""
    places = sorted({0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(given.flips))})
    flipped: list[bytes | None] = [
        content[:i] + bytes([content[i] ^ (1 << rng.randrange(8))]) + content[i + 1 :] for i in places
    ]
    cut: list[bytes | None] = [content[: len(content) // 2], content[:-1]]
    return {"flipped": flipped, "cut": cut, "emptied": [b""], "removed": [None]}


def judge(sentence: str, same: bool, path: Path) -> str:
    """Whether a damage was harmless, named, or something else."""
    if not sentence:
        return "harmless" if same else "DIFFERENT"
    kind, _, words = sentence.partition(": ")
    names = path.name in words or str(path.parent) in words or "there is no policy in" in words
    return "named" if kind in ("ValueError", "OSError") and names else "UNCLEAR"


def main(given: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Print what became of each file; ends with status 1 if any damage was neither harmless nor named."""
    rng, bad, work = random.Random(given.seed), [], Path(tempfile.mkdtemp(prefix="damage-run-"))
    config = config_of(given.steps)
    train(work / "whole", config, given.steps)
    _, expected = outcome(work / "whole", config)
    print("| run | file | flipped | cut | emptied | removed |\n|---|---|---|---|---|---|", flush=True)
    for state, until in (("stopped", given.steps // 2), ("finished", given.steps)):
        original, copy = work / state, work / "copy"
        train(original, config, until)
        for path in sorted(p.relative_to(original) for p in original.rglob("*") if p.is_file()):
            cells, content = [], (original / path).read_bytes()
            for kind, versions in damages(content, given, rng).items() if content else ():
                seen: Counter[str] = Counter()
                for version in versions:
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.copytree(original, copy)
                    (copy / path).unlink() if version is None else (copy / path).write_bytes(version)
                    sentence, found = outcome(copy, config)
                    seen[judge(sentence, found == expected, copy / path)] += 1
                    if judge(sentence, found == expected, copy / path) not in ("harmless", "named"):
                        bad.append(f"{state} {path} {kind}: {sentence or 'another result'}")
                cells.append(", ".join(f"{n} {result}" for result, n in sorted(seen.items())))
            if cells:
                print(f"| {state} | {path} | {' | '.join(cells)} |", flush=True)
    for line in bad:
        print(line)
    shutil.rmtree(work)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    tyro.cli(main)
