"""Checks the built site: `python docs/_build/check_site.py site`.

Every public name has an entry on an API page, no formula is left as TeX, and no page loads anything from a network.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def modules() -> Iterator[tuple[str, Path]]:
    """Every room: what a package exports, or what a module at the top defines. Commands have pages of their own."""
    for path in sorted((SOURCE / "marginax").iterdir()):
        if path.name.startswith(("_", "cli", "experiments")):
            continue
        if path.suffix == ".py":
            yield f"marginax.{path.stem}", path
        elif (path / "__init__.py").is_file():
            yield f"marginax.{path.name}", path / "__init__.py"


def public_names(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yields each public name of a module as (where it is public, where it is defined)."""
    tree = ast.parse(path.read_text())
    origin, exported, defined = {}, None, []
    lazy = [
        node for block in tree.body if isinstance(block, ast.If) for node in block.body
    ]  # for type checkers
    for node in (*tree.body, *lazy):
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


def problems(site: Path) -> Iterator[str]:
    """Everything that is wrong with the site, one sentence each."""
    anchors: set[str] = set()
    for page in sorted(site.rglob("*.html")):
        text = page.read_text()
        anchors.update(re.findall(r'id="(marginax[\w.]*)"', text))
        if 'class="arithmatex"' in text:
            yield f"{page}: a formula was left as TeX"
        prose = re.sub(r"<(script|style|pre|code)\b.*?</\1>", "", text, flags=re.S)
        if broken := re.search(r"\$[^$<\n]*\\[a-z]+", prose):  # a bar inside a formula ends a cell of a table
            yield f"{page}: a formula was not recognised: {broken.group()}"
        for address in re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', text):
            if "sitemap" not in address:
                yield f"{page} loads {address} from the network"
    homes: dict[str, set[str]] = {}  # where a thing is defined -> the names under which it is public
    for module, path in modules():
        for public, definition in public_names(module, path):
            homes.setdefault(definition, {definition}).add(public)
    for definition, names in sorted(homes.items()):
        if not names & anchors:
            yield f"no page in docs/api describes {definition}"


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    print("\n".join(found) or "the site is complete")
    sys.exit(bool(found))
