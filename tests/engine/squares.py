"""An experiment that costs nothing."""

import dataclasses
from typing import ClassVar

import numpy as np

from marginax import report
from marginax.experiments.runner import Experiment, Part


@dataclasses.dataclass(frozen=True)
class Squares(Experiment):
    """An experiment of four parts, one of which may be wrong."""

    name: ClassVar[str] = "squares"

    wrong: int = -1

    def parts(self):
        def compute(n):
            if n == self.wrong:
                raise ValueError(f"{n} is wrong")
            return {"square": np.array(n * n)}

        return [Part(f"{n}", {"n": n}, lambda n=n: compute(n), title=f"part {n}") for n in range(4)]

    def section(self, folder, data):
        return report.Section(self.name, "Squares")
