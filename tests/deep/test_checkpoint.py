"""Checkpoints: whole or not there, checked, and the previous one kept when the disk is full."""

import errno
import os

import jax
import numpy as np
import pytest

from marginax._files import save_json
from marginax.deep import checkpoint, td3
from marginax.deep.config import TD3Config
from marginax.deep.policy import load_policy


@pytest.fixture
def folder(tmp_path):
    checkpoint.save(tmp_path, {"step": 1}, {"one": {"x": np.arange(5.0)}})
    return tmp_path


@pytest.mark.slow
def test_an_agent_survives_the_round_trip_bit_by_bit(tmp_path):
    config = TD3Config(operator="marginalized", weights="fenchel", hidden=(8,))
    agents = [td3.init(config, observation_size=3, action_size=2, key=jax.random.key(i)) for i in (0, 1)]
    checkpoint.save(tmp_path, {}, {"agent": checkpoint.to_arrays(agents[0])})
    found = checkpoint.from_arrays(agents[1], checkpoint.load(tmp_path).files["agent"])
    for a, b in zip(jax.tree.leaves(agents[0]), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_another_agents_checkpoint_is_refused(tmp_path):
    small, large = (
        td3.init(TD3Config(hidden=(n,)), observation_size=3, action_size=2, key=jax.random.key(0))
        for n in (8, 16)
    )
    with pytest.raises(ValueError, match=r"weights\[0\] must be float32\[3, 16\] in the checkpoint"):
        checkpoint.from_arrays(large, checkpoint.to_arrays(small))


@pytest.mark.parametrize("dies_in", ["write", "fsync", "replace", "manifest"])
def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(folder, dies_in, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    renamed = []

    def rename(source, destination):
        if dies_in == "replace" or str(destination).endswith("manifest.json"):
            raise Killed
        renamed.append(destination)
        os.rename(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)  # the killed process tidies nothing
        if dies_in == "write":
            patch.setattr("numpy.lib.format.write_array", die)
        elif dies_in == "fsync":
            patch.setattr("os.fsync", die)
        else:
            patch.setattr("os.replace", rename)
        with pytest.raises(Killed):
            checkpoint.save(folder, {"step": 2}, {"two": {"x": np.zeros(3)}}, keep=["one"])
    found = checkpoint.load(folder)
    assert found.meta == {"step": 1}
    np.testing.assert_array_equal(found.files["one"]["x"], np.arange(5.0))
    checkpoint.save(folder, {"step": 2}, {"two": {"x": np.zeros(3)}})
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "two.npz"]


def test_a_full_disk_is_reported_and_the_last_good_checkpoint_stays(folder, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="the disk is full; the last good checkpoint is kept"):
            checkpoint.save(folder, {"step": 2}, {"two": {"x": np.zeros(3)}})
    assert checkpoint.load(folder).meta == {"step": 1}
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "one.npz"]


def test_a_damaged_checkpoint_is_never_loaded(folder):
    """Every byte of the file, flipped in turn; the file cut short; the file gone."""
    path = folder / "one.npz"
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"the checkpoint is damaged: .*one\.npz"):
            checkpoint.load(folder)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"the checkpoint is damaged: .*one\.npz"):
        checkpoint.load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"the checkpoint is damaged: .*one\.npz"):
        checkpoint.load(folder)


def test_a_damaged_manifest_is_never_loaded(folder):
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:-5])
    with pytest.raises(ValueError, match="the checkpoint is damaged"):
        checkpoint.load(folder)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        checkpoint.load(folder)
    save_json(manifest, {"format": 99})
    with pytest.raises(ValueError, match="not a checkpoint of this version"):
        checkpoint.load(folder)


def test_nothing_in_a_policy_file_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.savez(tmp_path / "policy-a-seed-0.npz", weight_0=np.array([Trap()], dtype=object))
    with pytest.raises(ValueError, match="is not a policy saved by marginax train"):
        load_policy(tmp_path)
    assert not (tmp_path / "sprung").exists()
