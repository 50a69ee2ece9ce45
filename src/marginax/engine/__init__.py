"""Where work runs: this machine's threads and processes, or a Ray cluster, behind one small interface.

A piece of work is a `Task`: a function and its arguments. An engine runs tasks side by side and yields what became of
them, in the order in which they end:

    with engine.make("local", workers=2) as place:
        for outcome in place.run(tasks):
            if outcome.error is None:
                keep(outcome.task, outcome.value)

Engines know nothing about experiments, agents or logs. `processes` is the one way to start processes here.
"""

from marginax.engine.interface import Crew, Engine, Outcome, Task, make, using

__all__ = ["Crew", "Engine", "Outcome", "Task", "make", "using"]
