"""A Markdown extension that links every figure to its file, so that a click shows it at its full size."""

import xml.etree.ElementTree as etree

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor


class _LinkFigures(Treeprocessor):
    def run(self, root: etree.Element) -> None:
        for paragraph in root.iter("p"):
            if len(paragraph) == 1 and paragraph[0].tag == "img":
                image = paragraph[0]
                source = image.get("src", "")
                link = etree.Element("a", {"href": source, "class": "figure", "title": "Show at full size"})
                link.append(image)
                paragraph[:] = [link]


class Figures(Extension):
    """Runs after the inline patterns, which make the images."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_LinkFigures(md), "figures", 0)


def makeExtension(**options: object) -> Figures:
    """What Python-Markdown calls."""
    return Figures(**options)
