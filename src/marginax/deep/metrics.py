"""Metrics as JSON lines, one for each evaluation of each agent, and as files for TensorBoard.

The lines repeat exactly when a run is repeated. A checkpoint knows the length and the checksum of what was written
before it, so a file that was shortened, changed or removed is noticed; what was written after it is written again.
"""

import hashlib
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

METRICS, BOARD = "metrics.jsonl", "tensorboard"


def slug(text: str) -> str:
    """A name that can be part of a file's."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text)


def check_slugs(name: str, texts: Iterable[str]) -> None:
    """Raise `ValueError` if two texts would have the same name in files."""
    seen: dict[str, str] = {}
    for text in texts:
        if (other := seen.get(slug(text))) is not None:
            raise ValueError(
                f"{name} must differ in names of files, but {other!r} and {text!r} are both {slug(text)!r} there."
            )
        seen[slug(text)] = text


def agent_name(label: str, seed: int) -> str:
    """The name of an agent in names of files."""
    return f"{slug(label)}-seed-{seed}"


def known_number(value: Any) -> float | None:
    """A number as a line of metrics has it: None, JSON's null, for what is not finite."""
    return float(value) if math.isfinite(value) else None


def read_metrics(folder: Path, known: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The lines of the metrics in a folder; a last line cut short by a killed process is left out.

    Args:
        folder: Of a population.
        known: Length and checksum of what its checkpoint knows.

    Raises:
        ValueError: If the file is not what was written.
    """
    path = folder / METRICS
    lines = _checked(path, known or {"bytes": 0})
    try:
        return [json.loads(line) for line in lines.split(b"\n")[:-1]]
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}.") from None


def _checked(path: Path, known: dict[str, Any]) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if known["bytes"]:
            raise ValueError(
                f"{str(path)!r} is missing: {known['bytes']} bytes were written to it."
            ) from None
        return b""
    start = content[: known["bytes"]]
    if known["bytes"] and hashlib.sha256(start).hexdigest() != known["sha256"]:
        what = "was shortened" if len(start) < known["bytes"] else "was changed"
        raise ValueError(f"{str(path)!r} is damaged: it {what} after its last checkpoint.")
    return content


class MetricsLog:
    """Writes the metrics of a population; the files of TensorBoard too, if tensorboardX is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / METRICS
        self.file: Any = None
        self.boards: dict[str, Any] | None = {} if importlib.util.find_spec("tensorboardX") else None

    def start(self, known: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Open the file after the lines that the checkpoint knows (None: there is no checkpoint); returns those.

        TensorBoard's files are written anew from the lines, so that no kill leaves a hole in them.
        """
        if known is None and self.path.exists():
            raise ValueError(
                f"{str(self.path)!r} is there, but no checkpoint: remove its folder to begin again."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        known = known or {"bytes": 0}
        content = _checked(self.path, known)[: known["bytes"]]
        self.file = self.path.open("ab")
        self.file.truncate(len(content))
        lines = [json.loads(line) for line in content.splitlines()]
        for path in (self.folder / BOARD).glob("*/events.*"):
            path.unlink()
        for line in lines:
            self._add_to_board(line)
        return lines

    def write(self, lines: list[dict[str, Any]], speed: float) -> None:
        """Append lines; TensorBoard also gets the speed, in steps per second."""
        try:
            for line in lines:
                self.file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self.file.flush()
        except OSError as error:  # such as a full disk
            error.filename = str(self.path)
            raise
        for line in lines:
            self._add_to_board({**line, "speed": speed})
        for board in (self.boards or {}).values():
            board.flush()

    def known(self) -> dict[str, Any]:
        """Bring the lines to the disk; their length and checksum."""
        self.file.flush()
        os.fsync(self.file.fileno())
        content = self.path.read_bytes()
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def close(self) -> None:
        """Close all files."""
        if self.file is not None:
            self.file.close()
        for board in (self.boards or {}).values():
            board.close()

    def _add_to_board(self, line: dict[str, Any]) -> None:
        if self.boards is None:
            return
        name = agent_name(line["operator"], line["seed"])
        if name not in self.boards:
            from tensorboardX import SummaryWriter

            self.boards[name] = SummaryWriter(str(self.folder / BOARD / name))
        for key, value in line.items():
            if isinstance(value, float):
                self.boards[name].add_scalar(key, value, line["step"])
