"""The progress of a run while it trains: a table on a terminal, lines anywhere else."""

import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any


def _mean_return(lines: list[dict[str, Any]]) -> float:
    """Over the lines that have one; NaN if none has."""
    known = [line["return"] for line in lines if line["return"] is not None]
    return sum(known) / len(known) if known else math.nan


def _clock(seconds: float) -> str:
    """A length of time in hours, minutes and seconds; there may be more hours than a day has."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


@dataclass
class _Row:
    step: int = 0
    speed: float = 0.0
    returned: float | None = None
    state: str = "waiting"


@dataclass
class Display:
    """The progress of the parts of a run: a live table on a terminal that can show it; anywhere else a line per evaluation."""

    title: str
    steps: int
    parts: list[str]
    told_later: tuple[str, ...] = ("failed",)  # states whose reason `finish` prints at the end
    rows: dict[str, _Row] = field(init=False)

    def __post_init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.rows = {name: _Row() for name in self.parts}
        self.console = Console(file=sys.stdout)
        wide = self.console.width >= 54 + max(map(len, self.parts), default=0)
        lively = self.console.is_interactive and wide
        self.live = Live(console=self.console, refresh_per_second=2) if lively else None
        self.drawn = 0.0

    def __enter__(self) -> "Display":
        if self.live is not None:
            self.live.__enter__()
        return self

    def __exit__(self, kind: Any, *details: Any) -> None:
        if self.live is not None:
            self.live.update(self._table())
            self.live.__exit__(kind, *details)
        reached = ", ".join(f"{name} at {row.step:,}" for name, row in self.rows.items() if row.step)
        if kind is KeyboardInterrupt:
            print("stopped; the same command carries on from the last checkpoints", flush=True)
        elif kind is SystemExit:
            print(f"checkpoints were written ({reached}); the same command carries on", flush=True)

    def listen(self, name: str, message: dict[str, Any]) -> None:
        """Show a message of a part."""
        row = self.rows[name]
        row.step, row.speed = message.get("step", row.step), message.get("speed", row.speed)
        row.state = message.get("state", "training")
        if lines := message.get("lines"):
            row.returned = _mean_return(lines)
        if self.live is None:
            self._print(name, row, message)
        elif time.monotonic() - self.drawn > 0.4:
            self.drawn = time.monotonic()
            self.live.update(self._table())

    def _print(self, name: str, row: _Row, message: dict[str, Any]) -> None:
        """A line for each evaluation, with the mean over the seeds of each operator, and one for a change of state."""
        by_step: dict[int, dict[str, list[dict[str, Any]]]] = {}
        for line in message.get("lines", []):
            by_step.setdefault(line["step"], {}).setdefault(line["operator"], []).append(line)
        for step, groups in by_step.items():
            means = ", ".join(f"{label} {_mean_return(x):.2f}" for label, x in groups.items())
            speed = f", {row.speed:.0f} steps/s" if row.speed else ""
            print(f"{name}: step {step:,}, return {means}{speed}", flush=True)
        if "state" in message:
            told = "reason" in message and row.state not in self.told_later
            reason = f": {message['reason']}" if told else ""
            print(f"{name}: {row.state} at step {row.step:,}{reason}", flush=True)

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(title=self.title, box=None, header_style="bold")
        for name in ("", "step", "", "steps/s", "return", "time left", "state"):
            table.add_column(name, justify="right")
        for name, row in self.rows.items():
            left = (self.steps - row.step) / row.speed if row.speed and row.state == "training" else None
            table.add_row(
                name,
                f"{row.step:,}",
                f"{row.step / self.steps:.0%}",
                f"{row.speed:.0f}" if row.speed else "",
                "" if row.returned is None else f"{row.returned:.1f}",
                "" if left is None else _clock(left),
                row.state,
            )
        return table
