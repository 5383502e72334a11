"""A budget in steps for loops whose number of rounds depends on the program.

A compilation has to return. A loop over the nodes of a graph ends. A loop that goes on until nothing changes ends if
something that is counted gets smaller each time. If our own code does not guarantee this, or if the count may grow with
a power of the graph, the loop takes a step of a budget each time.

Budgets count steps and never seconds: all ranks of a job have to decide alike, on machines of different speeds.
"""

from __future__ import annotations


class OutOfSteps(RuntimeError):
    """A budget was used up; the code in question is left as it is."""


class Steps:
    """A number of steps for one loop, or for several loops that do the same.

    what: a noun for what the steps are for, such as "sizes that are settled".
    """

    def __init__(self, what: str, limit: int) -> None:
        self.what, self.limit, self.taken = what, limit, 0

    def take(self) -> None:
        """Count a step; raises OutOfSteps if that was one too many."""
        self.taken += 1
        if self.taken > self.limit:
            raise OutOfSteps(f"no end was found within {self.limit:,} {self.what}")
