"""The shape of the package: who imports whom, what is imported lazily, what every public name brings."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "marginax"

# A room may import the rooms above it, and no other.
ROOMS = [
    "_checks",
    "_solve",
    "_highs",
    "policies",
    "mdp",
    "traces",
    "_bellman",
    "_credit",
    "operators",
    "linear_programs",
    "trajectories",
    "targets",
    "weights",
    "problems",
    "learning",
    "report",
    "simulators",
    "deep",
    "offline",
    "experiments",
    "cli",
]
NEVER_IMPORTED = {
    "experiments",
    "cli",
}  # the ends of the road: `cli` reaches `experiments` by name, when asked
OPTIONAL = {
    "dm_control",
    "gymnasium",
    "minari",
    "mujoco",
    "pyarrow",
    "pybullet",
    "pybullet_envs_gymnasium",
    "tensorboardX",
}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(path) for path in SOURCES]


def room(module: str) -> str:
    """The room of a module other than the package itself; `python -m marginax` is a door to `cli`."""
    return {"__main__": "cli"}.get(module.split(".")[1], module.split(".")[1])


def imported_names(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yields the dotted name of everything that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*anchor, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports in a module's source that go upwards or to the ends of the road."""
    here = room(module) if "." in module else None
    wrong = []
    for name in imported_names(ast.parse(source), module, is_package):
        parts = name.split(".")
        if parts[0] != "marginax" or len(parts) == 1 or parts[1] not in ROOMS or parts[1] == here:
            continue  # somebody else's, the package itself (its version), or the room's own
        if parts[1] in NEVER_IMPORTED or (here is not None and ROOMS.index(parts[1]) > ROOMS.index(here)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=MODULES)
def test_imports_go_downwards(path):
    module = module_name(path)
    if module != "marginax":
        assert room(module) in ROOMS, f"{module} belongs to no room: give its room a place in ROOMS"
    wrong = wrong_imports(path.read_text(), module, path.name == "__init__.py")
    assert not wrong, f"{module} must not import {', '.join(wrong)}"


def test_an_upward_import_is_noticed():
    assert wrong_imports("from marginax.deep import td3", "marginax.targets") == ["marginax.deep.td3"]
    assert wrong_imports("def f():\n    from . import operators", "marginax.mdp") == ["marginax.operators"]
    assert wrong_imports("from ..targets import vtrace", "marginax.mdp.sub") == ["marginax.targets.vtrace"]
    assert wrong_imports("import marginax.cli", "marginax", is_package=True) == ["marginax.cli"]
    assert wrong_imports("from . import mdp, targets", "marginax.deep.td3") == []
    assert wrong_imports("from .. import mdp\nimport numpy as np", "marginax.deep.td3") == []


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """Yields the packages that are imported as soon as the module is, leaving out `if TYPE_CHECKING`."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=MODULES)
def test_optional_packages_are_imported_lazily(path):
    eager = OPTIONAL.intersection(top_level_imports(ast.parse(path.read_text())))
    assert not eager, f"{module_name(path)} imports {', '.join(eager)} before anyone asked for it"


def test_import_leaves_jax_alone():
    """Importing marginax changes no JAX flag and starts no JAX backend."""
    script = """
import jax
before = dict(jax.config.values)
import marginax
assert dict(jax.config.values) == before
assert not jax._src.xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PACKAGE.parent)


def public_names(module) -> list[str]:
    """`__all__`, or else what the module itself defines without an underscore."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = (
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    )
    return sorted(name for name in own if not name.startswith("_"))


# The functions behind the command line are documented by --help, where a doctest would be out of place.
PUBLIC = [m for m in MODULES if not any(p.startswith("_") or p in {"cli", "command"} for p in m.split("."))]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_a_docstring_with_an_example(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for public in public_names(module):
        thing = getattr(module, public)
        if not (inspect.isclass(thing) or inspect.isroutine(inspect.unwrap(thing))):
            continue  # a constant or a submodule
        doc = inspect.getdoc(thing)
        assert doc, f"{name}.{public} has no docstring"
        if inspect.isclass(thing):
            if issubclass(thing, Exception):
                continue
            doc += "".join(
                inspect.getdoc(member) or "" for member in vars(thing).values() if callable(member)
            )
        assert ">>>" in doc, f"{name}.{public} has no example"
