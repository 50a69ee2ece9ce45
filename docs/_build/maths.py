"""A Markdown extension that turns TeX into MathML, so that a reader needs neither JavaScript nor a network."""

import html
import re

import latex2mathml.converter
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

# What pymdownx.arithmatex leaves behind for `$...$` and `$$...$$`.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
# What the font draws badly: a prime in a superscript is raised and made small twice, and a bar on a letter is hardly seen.
PRIME = re.compile(r"<msup>(<mi>\w</mi>)<mi>(&#x0203[23];)</mi></msup>")
BAR = re.compile(r'<mover><mi>([a-gi-z])</mi><mo stretchy="true">&#x000AF;</mo></mover>')


def mathml(tex: str, display: str) -> str:
    """The MathML of a piece of TeX; a command that cannot be rendered is an error, never raw TeX."""
    source = re.sub(r"(\\math(?:bb|bf|cal|rm)) ([A-Za-z])", r"\1{\2}", html.unescape(tex).strip())
    result = latex2mathml.converter.convert(source, display=display)
    unknown = re.search(r"\\[A-Za-z]+", html.unescape(result))
    if unknown:
        raise ValueError(f"no MathML for {unknown.group()} in ${source}$")
    result = PRIME.sub(r'<mrow>\1<mo lspace="0" rspace="0">\2</mo></mrow>', result)
    return BAR.sub(
        lambda m: f"<mi>&#{ord('𝑎') + ord(m[1]) - ord('a')};&#x304;</mi>", result
    )  # italic letter, combining bar


class _ToMathML(Postprocessor):
    def run(self, text: str) -> str:
        text = BLOCK.sub(lambda m: f'<div class="maths">{mathml(m.group(1), "block")}</div>', text)
        return INLINE.sub(lambda m: mathml(m.group(1), "inline"), text)


class MathML(Extension):
    """Runs after arithmatex and after raw HTML has been put back."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(_ToMathML(md), "mathml", -10)


def makeExtension(**options: object) -> MathML:
    """What Python-Markdown calls."""
    return MathML(**options)
