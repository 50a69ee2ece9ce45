"""The explorer: choose a problem, turn the policies and the traces, and see what every operator makes of it.

`numbers` computes what is shown, exactly; `app` draws it in a browser (Panel, the extra `explorer`).
"""

from typing import TYPE_CHECKING

from marginax._lazy import lazy

if TYPE_CHECKING:
    from marginax.explorer.numbers import Frontier, Picture, Setting, World, frontier, look, world

__all__ = ["Frontier", "Picture", "Setting", "World", "frontier", "look", "world"]

__getattr__ = lazy(__name__, dict.fromkeys(__all__, "numbers"))
