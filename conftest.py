"""Settings for every test and doctest: CPU, run-time type checks, reproducible Hypothesis."""

import os

# Before NumPy, JAX and MuJoCo are first imported. One thread each: xdist's workers would fight for the cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MUJOCO_GL", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
from jaxtyping import install_import_hook

from reference import typecheck

# Every annotation in marginax is checked at run time; the hook must come before marginax's first import.
install_import_hook("marginax", f"{typecheck.__name__}.check")

hypothesis.settings.register_profile("marginax", max_examples=30, deadline=None, derandomize=True)
hypothesis.settings.load_profile("marginax")
