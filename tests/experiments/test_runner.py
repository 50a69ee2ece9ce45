"""The runner: nothing is computed twice, nothing finished is lost, and damage is named."""

import dataclasses
import errno
import io
import os
import signal
import subprocess
import sys
import textwrap
from typing import ClassVar

import numpy as np
import pytest
import rich.console

from marginax import report
from marginax._files import write_csv
from marginax.experiments import runner

CALLS: list[int] = []


@dataclasses.dataclass(frozen=True)
class Squares(runner.Experiment):
    """Three numbers, squared."""

    name: ClassVar[str] = "squares"
    numbers: tuple[int, ...] = (1, 2, 3)
    power: int = 2

    def square(self, number):
        CALLS.append(number)
        if number < 0:
            raise KeyboardInterrupt
        return {"square": np.array(number**self.power)}

    def parts(self):
        return [
            runner.Part(f"part-{n}", {"number": n, "power": self.power}, lambda n=n: self.square(n))
            for n in self.numbers
        ]

    def section(self, folder, data):
        write_csv(folder / "squares.csv", ["square"], [[float(a["square"])] for a in data.values()])
        return report.Section(self.name, "Squares", data=("squares.csv",))


def run(out, **settings):
    CALLS.clear()
    console = rich.console.Console(file=io.StringIO())
    sections = runner.run([Squares(**settings)], out, workers=1, console=console)
    return sections, console.file.getvalue()


def test_a_finished_experiment_is_not_computed_again(tmp_path):
    (first,), _ = run(tmp_path)
    assert CALLS == [1, 2, 3]
    (again,), said = run(tmp_path)
    assert CALLS == []
    assert "finished earlier" in said
    assert again.key == first.key
    assert (tmp_path / "squares" / "squares.csv").read_text() == "square\n1\n4\n9\n"


def test_changed_settings_compute_only_what_they_change(tmp_path):
    run(tmp_path)
    run(tmp_path, numbers=(1, 2, 5))
    assert CALLS == [5]
    (section,), _ = run(tmp_path, power=3)
    assert CALLS == [1, 2, 3]
    assert section.settings["power"] == 3
    assert "27" in (tmp_path / "squares" / "squares.csv").read_text()


def test_an_interrupted_run_carries_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, numbers=(1, 2, -1, 3))
    assert CALLS[:3] == [1, 2, -1]
    run(tmp_path, numbers=(1, 2, 3))
    assert 1 not in CALLS
    assert 2 not in CALLS


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_a_damaged_part_is_named_and_nothing_is_overwritten(tmp_path, content):
    run(tmp_path)
    path = next((tmp_path / "squares" / "parts").glob("part-2-*"))
    broken = path.read_bytes()[:-30] if content is None else content
    path.write_bytes(broken)
    (tmp_path / "squares" / "result.json").unlink()
    with pytest.raises(ValueError, match=rf"{path.name}.*damaged"):
        run(tmp_path)
    assert path.read_bytes() == broken


def test_a_full_disk_is_reported_and_what_was_finished_stays(tmp_path, monkeypatch):
    real = np.savez

    def savez(file, **arrays):
        if arrays["square"] == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, **arrays)

    monkeypatch.setattr(np, "savez", savez)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path)
    monkeypatch.undo()
    run(tmp_path)
    assert 1 not in CALLS


def test_all_finished_sections_are_found_in_order(tmp_path):
    for name in ("zebra", "control", "squares", "chain"):
        (tmp_path / name).mkdir()
        report.save_section(tmp_path / name, report.Section(name, name))
    (tmp_path / "unfinished").mkdir()
    found = [section.name for _, section in runner.sections_on_disk(tmp_path, ["chain", "control"])]
    assert found == ["chain", "control", "squares", "zebra"]


SLOW = """
import dataclasses, pathlib, signal, sys, time
import numpy as np
from marginax import report
from marginax.experiments import runner

@dataclasses.dataclass(frozen=True)
class Slow(runner.Experiment):
    name = "slow"
    def wait(self, n):
        if n:
            print("waiting", flush=True)
            time.sleep(1.5)
        return {"n": np.array(n)}
    def parts(self):
        return [runner.Part(f"p{n}", {"n": n}, lambda n=n: self.wait(n)) for n in range(9)]
    def section(self, folder, data):
        return report.Section("slow", "Slow")

signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
try:
    runner.run([Slow()], pathlib.Path(sys.argv[1]), workers=1)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_control_c_leaves_what_is_finished(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SLOW))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    saved = sorted(path.name[:2] for path in (tmp_path / "out" / "slow" / "parts").glob("p*.npz"))
    assert saved[0] == "p0"
    assert len(saved) < 9
    assert not (tmp_path / "out" / "slow" / "result.json").exists()
