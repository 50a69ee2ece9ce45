"""The shape of the package: who imports whom, what is imported lazily, what every public name brings."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "marginax"

# A room may import the rooms above it, and no other.
ROOMS = [
    *(
        "_lazy",
        "_checks",
        "_solve",
        "_files",
        "_folders",
        "_interrupts",
        "statistics",
        "policies",
        "mdp",
        "traces",
        "_bellman",
        "_credit",
    ),
    *(
        "operators",
        "linear_programs",
        "trajectories",
        "targets",
        "weights",
        "problems",
        "learning",
        "report",
        "explorer",
    ),
    *("engine", "simulators", "deep", "offline", "experiments", "torch", "testing", "cli"),
]
ENDS = {"experiments", "cli"}  # nothing imports these: `cli` finds `experiments` by name, when asked
OPTIONAL = {
    *("dm_control", "gymnasium", "minari", "mujoco", "pyarrow", "pybullet", "pybullet_envs_gymnasium"),
    *("fsspec", "ray", "tensorboardX", "torch"),
}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
    """The imports in a module's source that go upwards, to the ends of the road, or into another room's privacy."""
    here = room(module) if "." in module else None
    wrong = []
    for name in imported_names(ast.parse(source), module, is_package):
        parts = name.split(".")
        if parts[0] != "marginax" or len(parts) == 1 or parts[1] not in ROOMS or parts[1] == here:
            continue  # somebody else's, the package itself (its version), or the room's own
        upwards = here is not None and ROOMS.index(parts[1]) > ROOMS.index(here)
        private = any(part.startswith("_") for part in parts[2:])
        if parts[1] in ENDS or upwards or private:
            wrong.append(name)
    return wrong


def test_imports_go_downwards_and_respect_privacy():
    for path in SOURCES:
        module = module_name(path)
        if module != "marginax":
            assert room(module) in ROOMS, f"{module} belongs to no room: give its room a place in ROOMS"
        wrong = wrong_imports(path.read_text(), module, path.name == "__init__.py")
        assert not wrong, f"{module} must not import {', '.join(wrong)}"


def test_a_wrong_import_is_noticed():
    assert wrong_imports("from marginax.deep import td3", "marginax.targets") == ["marginax.deep.td3"]
    assert wrong_imports("def f():\n    from . import operators", "marginax.mdp") == ["marginax.operators"]
    assert wrong_imports("from ..targets import vtrace", "marginax.mdp.sub") == ["marginax.targets.vtrace"]
    assert wrong_imports("import marginax.cli", "marginax", is_package=True) == ["marginax.cli"]
    assert wrong_imports("from marginax.weights._a import b", "marginax.deep.td3") == [
        "marginax.weights._a.b"
    ]
    assert wrong_imports("from . import mdp, targets", "marginax.deep.td3") == []
    assert wrong_imports("from .. import mdp, _checks\nimport numpy as np", "marginax.deep.td3") == []


def test_optional_packages_are_imported_lazily():
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            eager = OPTIONAL.intersection(name.split(".")[0] for name in names)
            if module_name(path).startswith("marginax.torch"):  # the bridge for those who have torch
                eager -= {"torch"}
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


def test_public_names_have_a_docstring():
    for path in SOURCES:
        module = module_name(path)
        if any(part.startswith("_") for part in module.split(".")):
            continue
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{module} has no docstring"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module}.{node.name} has no docstring"
