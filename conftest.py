"""Settings for every test and doctest: CPU, run-time type checks, reproducible Hypothesis."""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path

# Before NumPy, JAX and MuJoCo are first imported. One thread each: xdist's workers would fight for the cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MUJOCO_GL", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Programs that one worker compiled are read by the others, by processes that tests start, and by the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import pytest
from jaxtyping import install_import_hook

from reference import typecheck

# Every annotation in marginax is checked at run time; the hook must come before marginax's first import.
install_import_hook("marginax", f"{typecheck.__name__}.check")

hypothesis.settings.register_profile("marginax", max_examples=20, deadline=None, derandomize=True)
hypothesis.settings.load_profile("marginax")


def pytest_configure(config: pytest.Config) -> None:
    """The fast tests mostly compile, so they compile without optimising; the slow ones run the programs that users run."""
    if config.option.markexpr.startswith("not slow"):
        os.environ.setdefault(
            "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        )


_SOURCE = Path(__file__).parent / "src"

# The examples there need PyTorch, which is no dependency.
collect_ignore = [] if importlib.util.find_spec("torch") else ["src/marginax/torch"]


def pytest_collect_file(file_path: Path) -> None:
    """Import a module by its name before pytest does: of a package's module collected alone it would make a second one."""
    if file_path.suffix == ".py" and file_path.is_relative_to(_SOURCE):
        parts = file_path.relative_to(_SOURCE).with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))


_MOST_MEMORY = 1.6e9  # bytes of one worker


@pytest.fixture(autouse=True)
def _bounded_memory():
    """Gives memory that compilations have freed back to the system; forgets compiled programs if that is not enough."""
    yield
    if _resident_bytes() > _MOST_MEMORY:
        _trim()
    if _resident_bytes() > _MOST_MEMORY and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        _trim()


def _trim() -> None:
    with contextlib.suppress(AttributeError, OSError):  # the C library is not GNU's
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _skip_without_wheels(error: ImportError) -> None:
    if "has no wheels for Python" in str(error):
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    """Skips what needs a simulator that this Python has no wheels for."""
    try:
        return (yield)
    except ImportError as error:
        _skip_without_wheels(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """The same for what a test itself imports."""
    try:
        return (yield)
    except ImportError as error:
        _skip_without_wheels(error)
        raise
