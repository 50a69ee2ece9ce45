"""The bridge for PyTorch users: `marginax.torch.targets` has every function of `marginax.targets`, on tensors.

Pure PyTorch: nothing here imports JAX, and PyTorch itself is imported when the first function is called. It is not a
dependency of this package, so install it yourself.
"""

from marginax.torch import targets

__all__ = ["targets"]
