"""Turns TeX into MathML while the site is built, so that a reader needs neither JavaScript nor a network."""

import html
import re

import latex2mathml.converter
from mkdocs.exceptions import PluginError

# What pymdownx.arithmatex leaves behind for `$...$` and `$$...$$`.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def mathml(tex: str, display: str, where: str) -> str:
    """The MathML of a piece of TeX; a command that cannot be rendered is an error, never raw TeX."""
    source = re.sub(r"(\\math(?:bb|bf|cal|rm)) ([A-Za-z])", r"\1{\2}", html.unescape(tex).strip())
    result = latex2mathml.converter.convert(source, display=display)
    unknown = re.search(r"\\[A-Za-z]+", html.unescape(result))
    if unknown:
        raise PluginError(f"{where}: no MathML for {unknown.group()} in ${source}$")
    return result


def on_page_content(content: str, page, **_) -> str:
    where = page.file.src_path
    content = BLOCK.sub(lambda m: f'<div class="maths">{mathml(m.group(1), "block", where)}</div>', content)
    return INLINE.sub(lambda m: mathml(m.group(1), "inline", where), content)
