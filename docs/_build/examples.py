"""Shows `>>>` examples in docstrings as code, wherever in the docstring they stand (a Griffe extension)."""

import re

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n *\S.*)*", re.MULTILINE)


def fence(match: re.Match[str]) -> str:
    indent = match["indent"]
    return f"{indent}```pycon\n{match[0]}\n{indent}```"


class FencedExamples(griffe.Extension):
    """Puts a fence around every block of lines that starts with `>>>`."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring and "```" not in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(fence, obj.docstring.value)
