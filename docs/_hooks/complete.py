"""Fails the build when a public name has no page; lists the API pages in the navigation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
anchors: set[str] = set()


def modules() -> Iterator[tuple[str, Path]]:
    """Every public module: no underscore anywhere in its name. The command line has pages of its own."""
    for path in sorted((SOURCE / "marginax").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") or part in {"cli", "command"} for part in parts):
            yield ".".join(parts), path


def public_names(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yields each public name of a module as (where it is public, where it is defined)."""
    tree = ast.parse(path.read_text())
    origin, exported, defined = {}, None, []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            origin |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            defined.append(node.name)
        elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            exported = list(ast.literal_eval(node.value))
    for name in defined if exported is None else exported:
        if not name.startswith("__"):
            yield f"{module}.{name}", origin.get(name, f"{module}.{name}")


def expand(entry: dict, docs: Path) -> dict:
    """Lists the pages of a folder where an entry of the navigation names one."""
    ((title, target),) = entry.items()
    if not (isinstance(target, str) and target.endswith("/")):
        return entry
    pages = sorted((docs / target).glob("*.md"))
    return {title: [{f"marginax.{page.stem}": page.relative_to(docs).as_posix()} for page in pages]}


def on_config(config, **_):
    anchors.clear()
    config.nav = [expand(entry, Path(config.docs_dir)) for entry in config.nav]
    return config


def on_post_page(output: str, **_) -> str:
    anchors.update(re.findall(r'id="(marginax[\w.]*)"', output))
    return output


def on_post_build(**_) -> None:
    homes: dict[str, set[str]] = {}  # where a thing is defined -> the names under which it is public
    for module, path in modules():
        for public, definition in public_names(module, path):
            homes.setdefault(definition, {definition}).add(public)
    missing = sorted(definition for definition, names in homes.items() if not names & anchors)
    if missing:
        raise PluginError("no page in docs/api describes " + ", ".join(missing))
