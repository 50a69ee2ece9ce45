"""Folders: locks that name their holder, and copies of folders on other file systems."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from marginax._folders import Lock, fetch, opened, push, whereabouts


@pytest.fixture(params=["dir://sub/deep::file://{}", "file://{}/sub/deep"])
def there(request, tmp_path):
    """An address, and the folder in which its files are."""
    pytest.importorskip("fsspec")
    pytest.importorskip("pyarrow")
    return request.param.format(tmp_path), tmp_path / "sub" / "deep"


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_is_pushed_is_there_and_is_fetched_again(there):
    address, folder = there
    with opened(address) as here:
        (here / "a").mkdir()
        (here / "a" / "one.npz").write_bytes(b"1")
        (here / "a" / ".lock").write_bytes(b"hidden")
        (here / "a" / "empty").touch()
        push(here / "a")
        assert files(folder) == {"a/one.npz"}
        (here / "a" / "one.npz").unlink()
        (here / "a" / "two.npz").write_bytes(b"22")
        push(here / "a")
        assert files(folder) == {"a/two.npz"}
        (here / "b.json").write_text("last")
    assert not here.exists() and files(folder) == {"a/two.npz", "b.json"}
    with opened(address, without="a/*.npz") as here:
        assert files(here) == {"b.json"}
        push(here)
    assert files(folder) == {"a/two.npz", "b.json"}  # what was not fetched is not removed


def test_the_name_of_a_folder_may_end_with_a_dot(tmp_path):
    pytest.importorskip("pyarrow")
    pytest.importorskip("fsspec")
    (tmp_path / "v1.").mkdir()
    (tmp_path / "v1." / "a").write_text("1")
    with opened(f"file://{tmp_path}/v1.") as here:
        assert files(here) == {"a"}


def test_a_folder_in_a_copy_is_opened_elsewhere(there):
    address, folder = there
    with opened(address) as here:
        with opened(**whereabouts(here / "run" / "part")) as part:  # as another machine would
            assert part != here / "run" / "part"
            (part / "metrics").write_text("3")
        fetch(here / "run")
        assert (here / "run" / "part" / "metrics").read_text() == "3"
    assert files(folder) == {"run/part/metrics"}
    assert whereabouts(folder) == {"address": str(folder), "below": ""}


def test_files_that_describe_others_go_last_and_a_broken_connection_leaves_old_ones(there, monkeypatch):
    address, folder = there
    with opened(address) as here:
        (here / "manifest.json").write_text("old")
        push(here)
        (here / "manifest.json").write_text("names b")
        (here / "b").write_text("b")
        with monkeypatch.context() as broken:
            broken.setattr("shutil.copyfileobj", broken_at("names b"))
            with pytest.raises(OSError, match="gone"):
                push(here)
        assert (folder / "manifest.json").read_text() == "old" and (folder / "b").exists()
    with opened(address) as here:
        assert files(here) == {"manifest.json", "b"}


def broken_at(content):
    def copy(source, target, size):
        data = source.read()
        target.write(data[:3])
        if data == content.encode():
            raise OSError("gone")
        target.write(data[3:])

    return copy


def test_an_empty_string_is_no_folder():
    with pytest.raises(ValueError, match="the folder must be a path or an address, got ''"), opened(""):
        pass


def test_what_cannot_be_opened_is_said(tmp_path):
    pytest.importorskip("fsspec")
    with (
        pytest.raises(ValueError, match="'nope://x' is on no file system that pyarrow or fsspec knows"),
        opened("nope://x"),
    ):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(OSError, match="cannot write to the folder 'file:"),
        opened(f"file://{tmp_path}/file/x"),
    ):
        pass


def test_a_lock_names_its_holder_and_goes_with_it(tmp_path):
    script = """
    import pathlib, sys, time
    from marginax._folders import Lock
    with Lock(pathlib.Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with (
        pytest.raises(RuntimeError, match=rf"run' is in use by process {process.pid} \(.*\) on .* since 20"),
        Lock(tmp_path / "run"),
    ):
        pass
    process.kill()
    process.wait()
    assert (tmp_path / "run" / ".lock").exists()
    with Lock(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_on_a_full_disk_is_held_without_a_name(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with Lock(tmp_path), pytest.raises(RuntimeError, match="is in use by another process"), Lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
