"""What a user without PyTorch is told."""

import sys

import pytest

import marginax as mx


def test_a_missing_pytorch_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"^marginax.torch needs PyTorch: pip install torch.$"):
        mx.torch.targets.multi_step([1.0], [1.0], 1.0, 0.9, 1.0)
