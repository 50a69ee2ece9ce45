"""Files: whole or not there, and damage anywhere is noticed."""

import errno
import os

import numpy as np
import pytest

from marginax._files import (
    atomic_write,
    check_writable,
    load_arrays,
    load_json,
    save_arrays,
    save_json,
    write_csv,
)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")

    def full(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"No space left on device: {str(path)!r}"):
        atomic_write(path, full)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_mode_of_the_umask_which_is_never_changed(tmp_path, monkeypatch):
    """The umask belongs to all threads: one that sets it for a moment changes the files of the others."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as frozen:
            frozen.setattr(os, "umask", None)
            atomic_write(tmp_path / "a", lambda file: file.write(b"x"))
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to the folder .*file"):
        check_writable(tmp_path / "file" / "below")


def test_csv_keeps_integers_and_nine_digits(tmp_path):
    rows = [[1, np.float32(0.5), "a,b"], [np.int64(12_345_678_901), 1 / 3, None]]
    write_csv(tmp_path / "t.csv", ["n", "x", "s"], rows)
    assert (tmp_path / "t.csv").read_text() == 'n,x,s\n1,0.5,"a,b"\n12345678901,0.333333333,\n'


ARRAYS = {"x": np.arange(3.0), "file": np.array([[True]]), "0/steps": np.array(7), "empty": np.zeros((0, 2))}


def test_arrays_come_back_and_other_programs_read_them(tmp_path):
    save_arrays(tmp_path / "a.npz", ARRAYS)
    for found in (load_arrays(tmp_path / "a.npz"), np.load(tmp_path / "a.npz")):
        assert set(found) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype and found[name].shape == array.shape


def test_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "a.npz"
    save_arrays(path, ARRAYS)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"a\.npz' is damaged"):
            load_arrays(path)
    for damaged in (b"", whole[:-1], whole[:40], whole + b"x", b"x" * 200):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            load_arrays(path)


def test_python_objects_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Object arrays"):
        save_arrays(tmp_path / "a.npz", {"x": np.array([object()])})
    assert list(tmp_path.iterdir()) == []


def test_json_notices_a_changed_digit(tmp_path):
    path = tmp_path / "a.json"
    data = {"step": 12, "rate": 0.1, "names": ("é", None), "by number": {10: 1, 9: float("inf")}}
    save_json(path, data)
    assert load_json(path) == {**data, "names": ["é", None], "by number": {"10": 1, "9": float("inf")}}
    whole = path.read_text()
    for damaged in (whole.replace("12", "13"), whole[:-3], "[]", "", '{"step": 12}'):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"a\.json' is damaged"):
            load_json(path)
