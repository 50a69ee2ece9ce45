"""The runner: nothing is computed twice, nothing finished is lost, and damage is named."""

import dataclasses
import errno
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
from typing import ClassVar

import numpy as np
import pytest
import rich.console

from marginax import engine, report
from marginax._files import write_csv
from marginax._folders import Lock
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
        return {"square": np.array(float(number) ** self.power)}

    def parts(self):
        return [
            runner.Part(
                f"part-{n}",
                {"number": n, "power": self.power},
                lambda n=n: self.square(n),
                title=f"the number {n}",
            )
            for n in self.numbers
        ]

    def section(self, folder, data):
        write_csv(folder / "squares.csv", ["square"], [[float(a["square"])] for a in data.values()])
        return report.Section(self.name, "Squares", data=("squares.csv",))


def run(out, terminal=None, **settings):
    CALLS.clear()
    console = rich.console.Console(file=io.StringIO(), force_terminal=terminal)
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


def test_any_flipped_byte_of_a_part_is_noticed(tmp_path):
    run(tmp_path)
    path = next((tmp_path / "squares" / "parts").glob("part-2-*"))
    content = path.read_bytes()
    (tmp_path / "squares" / "result.json").unlink()
    for place in range(0, len(content), 37):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=rf"the earlier result .*{path.name}.*damaged.*; remove it"):
            run(tmp_path)


def test_a_full_disk_is_reported_and_what_was_finished_stays(tmp_path, monkeypatch):
    real = runner.save_arrays

    def save(path, arrays):
        if arrays["square"] == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, arrays)

    monkeypatch.setattr(runner, "save_arrays", save)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path)
    monkeypatch.undo()
    run(tmp_path)
    assert 1 not in CALLS


def test_a_part_that_fails_is_named_and_the_others_are_kept(tmp_path):
    with pytest.raises(
        RuntimeError,
        match=r"squares: the number 0: ZeroDivisionError.*run the same command to try the failed ones again",
    ):
        run(tmp_path, numbers=(1, 0, 3), power=-1)
    assert CALLS == [1, 0, 3]
    run(tmp_path, numbers=(1, 3), power=-1)
    assert CALLS == []


def test_changed_code_is_computed_again_and_replaces_the_old(tmp_path, monkeypatch):
    run(tmp_path)
    monkeypatch.setattr(runner, "code_fingerprint", lambda module, without=(): "0123456789ab")
    run(tmp_path)
    assert CALLS == [1, 2, 3]
    assert len(list((tmp_path / "squares" / "parts").iterdir())) == 3
    monkeypatch.setattr(runner, "code_fingerprint", lambda module, without=(): "new" if without else "old")
    run(tmp_path)
    assert CALLS == [1, 2, 3]
    monkeypatch.setattr(runner, "code_fingerprint", lambda module, without=(): "new" if without else "newer")
    _, said = run(tmp_path)
    assert CALLS == [] and "finished earlier" not in said  # only how it is shown has changed


def test_the_fingerprint_of_code_follows_imports(tmp_path, monkeypatch):
    files = {
        "__init__.py": "from marginax import unused",
        "a.py": "def f():\n    from marginax.room import thing",
        "room/__init__.py": "from ._inner import thing",
        "room/_inner.py": "thing = 1",
        "unused.py": "",
    }
    (tmp_path / "room").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(runner.marginax, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(runner, "_imports", runner._imports.__wrapped__)
    tmp_path.rename(tmp_path.parent / "marginax")
    root = tmp_path.parent / "marginax"
    monkeypatch.setattr(runner.marginax, "__file__", str(root / "__init__.py"))
    before, without = runner.code_fingerprint("marginax.a"), runner.code_fingerprint("marginax.a", ["room"])
    (root / "unused.py").write_text("changed = 1")
    assert runner.code_fingerprint("marginax.a") == before
    (root / "room" / "_inner.py").write_text("thing = 2")
    assert runner.code_fingerprint("marginax.a") != before
    assert runner.code_fingerprint("marginax.a", ["room"]) == without


def test_two_runs_do_not_share_a_folder(tmp_path):
    with (
        Lock(tmp_path / "squares"),
        pytest.raises(RuntimeError, match=rf"squares' is in use by process {os.getpid()}"),
    ):
        run(tmp_path)
    assert CALLS == []


@pytest.mark.parametrize("terminal", [False, True], ids=["no terminal", "dumb terminal"])
def test_where_nothing_can_be_redrawn_there_is_a_line_for_each_part(terminal, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    _, said = run(tmp_path, terminal)
    first, *_, last = said.splitlines()
    assert re.fullmatch(r"squares: the number 1: took 0\.0 s \(1 of 3, about 0:\d\d left\)", first)
    assert last.startswith("✓ squares: finished")


def test_time_left_begins_at_what_is_expected_and_follows_what_is_measured(tmp_path):
    work = runner._Work(Squares(), tmp_path)
    parts = [runner.Part(str(k), {}, dict, cost=10.0, program="p", setup=20.0) for k in range(8)]
    progress = runner._Progress([(work, part) for part in parts], 2, rich.console.Console(file=io.StringIO()))
    assert progress.time_left() == "about 0:50 left"  # (8 * 10 + 20) / 2
    first = runner._task(work, parts[0])
    progress.finished(engine.Outcome(first, {}, None, 60.0), parts[0])
    slower = (20 + 60) / (20 + 30)  # a fifth of the whole counts as having taken what was expected
    seconds = int(70 * slower / 2)
    assert progress.time_left() == f"about 0:{seconds} left"


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
            time.sleep(600)
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


def test_control_c_does_not_wait_and_leaves_what_is_finished(tmp_path):
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
    folder = tmp_path / "out" / "slow"
    assert [path.name[:2] for path in (folder / "parts").iterdir()] == ["p0"]
    assert [path.name for path in folder.iterdir()] == ["parts"]
