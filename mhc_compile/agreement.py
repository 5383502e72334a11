"""All ranks of a job change a graph in the same way, or none does.

Whether a graph is changed depends on the graph alone, and on nothing that only one process has: no time, no file, no
environment variable. So a failure that the graph causes happens on all ranks. But a process may run out of memory or
stack alone. If this rank then kept its graph as it was, it would round differently from the others. Replicas of one
tensor would drift apart, and Inductor might order its collectives in another way.

So ranks vote, in the store by which the job's process group was made:

- A rank announces a graph before it looks at it, by the graph's structure. Afterwards it votes: for a change, with all
  that failed on the way, or against any.
- It waits for the votes of ranks that have announced the same graph, and of no others. It does not wait for ranks that
  compile other graphs, such as the stages of a pipeline, or that compile later. The ranks that it waits for are inside
  our passes, which end (`budget`) and call no collective. Ranks of one program begin at slightly different times. So a
  rank with a change gives all others a few seconds to announce. A rank that has begun as many graphs as this one at the
  same stage, and has not announced this graph, has another one in its place: after that nobody waits for it. If others
  did not begin any, the process does not wait like this again.
- The first rank that has seen all these votes writes the verdict: the change, if all ranks vote for the same one. Later
  ranks are bound by it. If no graph was changed, a later rank leaves its own as it was. If others have changed theirs
  and it cannot, it stops with an error.

Waiting decides no graph: a rank that is later than others agrees with them or stops, and a rank that dies among the
passes ends the wait of the others with an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import fx

from mhc_compile import compat
from mhc_compile.guard import Deliberate, described, guard, told

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE = 0.002  # seconds
_PATIENCE = 5.0  # seconds
_LEFT = "left"
# What the same failure calls something else on each rank: an address, a device.
_OF_A_RANK = re.compile(r"0x[0-9a-f]+|cuda:\d+|index=\d+")

# How often this process has announced a graph, by rank (tests run several in one process) and structure; and how often
# any graph, by rank and stage. A graph that is compiled again, for other sizes, is voted on again.
_announced: Counter[tuple[int, str]] = Counter()


class FailedAlone(Deliberate):
    """This rank could not change a graph as other ranks of the job have changed it."""


class Vote:
    """One rank's vote on the change of one graph; without a store the rank decides alone.

    turn is a key of the store that ranks have in common which announce as many graphs as this one, whatever graphs.
    """

    _waited_in_vain = False

    def __init__(self, store: Any, key: str, ranks: int = 1, turn: str = "") -> None:
        self._store, self._key, self._ranks, self._turn = store, key, ranks, turn
        self._open = store is not None
        if self._open:
            self._count("announced")
            if turn:
                self._store.add(turn, 1)  # afterwards: whoever is counted here has announced what it has

    def is_for_change(self, failures: str, *, possible: bool, changed: bool = True) -> bool:
        """Whether the graph is changed on all ranks. failures says what went wrong here. possible says whether a change
        is still possible here, and changed whether there is one.

        Raises FailedAlone if other ranks have changed their graphs in another way.
        """
        if self._store is None:
            return possible
        change = f"changed {digest(_OF_A_RANK.sub('', failures))}"
        mine = change if possible else _LEFT
        try:
            verdict = self._verdict(mine, gather=possible and changed)
        except Deliberate:
            raise
        except Exception as error:  # the store cannot be reached, and nothing is known of the others
            verdict = mine if possible and not failures else f"unknown: {described(error)}"
        if verdict not in (mine, _LEFT):
            raise FailedAlone(
                f"rank {compat.rank()} cannot rewrite a graph as other ranks of this job have rewritten it, and would "
                f"compute with other roundings than they do: {failures or 'something failed on those'}"
            )
        return bool(verdict != _LEFT)

    def _verdict(self, mine: str, *, gather: bool) -> str:
        self._count(mine)
        self._count("voted")
        self.close()
        if gather:
            self._gather()
        self._wait()
        votes = self._read("voted")  # first: whoever is counted here is counted below
        proposed = mine if self._read(mine) >= votes else _LEFT
        return str(self._store.compare_set(f"{self._key}/verdict", "", proposed).decode())

    def close(self) -> None:
        """Let no rank wait for this one any longer."""
        if self._open:
            self._open = False
            self._count("closed")

    def _count(self, what: str) -> None:
        self._store.add(f"{self._key}/{what}", 1)

    def _read(self, what: str) -> int:
        return int(self._store.add(f"{self._key}/{what}", 0))

    def _gather(self) -> None:
        """Let ranks that begin a little later take part."""
        end = time.monotonic() + _PATIENCE
        while not (Vote._waited_in_vain or self._all_have_begun()):
            Vote._waited_in_vain = time.monotonic() > end
            time.sleep(_PAUSE)

    def _all_have_begun(self) -> bool:
        """Whether all ranks have announced this graph, or others instead."""
        if self._read("announced") >= self._ranks:
            return True
        return bool(self._turn) and int(self._store.add(self._turn, 0)) >= self._ranks

    def _wait(self) -> None:
        end = time.monotonic() + self._store.timeout.total_seconds()
        while self._read("closed") < self._read("announced"):  # read in this order: all of these have voted
            if time.monotonic() > end:
                raise Deliberate("a rank that compiles the same graph as this one has not said what became of it")
            time.sleep(_PAUSE)


@contextlib.contextmanager
def announced(stage: str, graph: fx.Graph) -> Iterator[Vote]:
    """The vote on a change of a graph, for which other ranks wait until this context is left."""
    store, key, turn = compat.job_store(), "", ""
    if store is not None:
        key, turn = _next(f"{stage}/{structure(graph)}"), _next(f"{stage}/begun")
    vote = Vote(store, key, compat.ranks(), turn)
    try:
        yield vote
    finally:
        with guard("other ranks may wait for this one"):
            vote.close()


def attempt(
    stage: str, graph: fx.Graph, errors: list[str], change: Callable[[], T], undo: Callable[[], None]
) -> T | None:
    """Change a graph, or leave it as it was: returns what `change` returns, or None if it failed and was undone.

    `change` returns something false if it found nothing to change.

    In a job of several ranks all that have this graph change it in one way, or none does (see above): `undo` is also
    called where `change` worked here and failed elsewhere. stage names what is done, such as "rewriting". errors are
    those of what `change` does to the graph, and of nothing else.
    """
    follows = f"{stage} failed, and this graph is compiled without it"
    before = len(errors)
    result: T | None = None
    with announced(stage, graph) as vote:
        possible = True
        try:
            result = change()
        except Exception as error:
            possible = False
            told(error, follows, errors)
            with guard("a graph could not be put back", errors):
                undo()
        if vote.is_for_change("; ".join(errors[before:]), possible=possible, changed=bool(result)):
            return result
        if possible:
            with guard("a graph could not be put back", errors):
                undo()
            message = (
                f"{stage} does not come out alike on all ranks, and this graph is compiled without it on all of them"
            )
            log.warning("%s", message)
            errors.append(message)
    return None


class Ballot:
    """What ranks have found out about the parts of a graph while it ran, and from which call on this counts.

    No rank waits: another rank may need this one to continue. The first rank that reaches a call of the graph decides
    for all what this call does, from what has been posted until then. So ranks that call a graph in step switch to the
    compiled graph together.
    """

    def __init__(self, graph: fx.Graph, parts: int) -> None:
        self._store, self._parts, self._mine = compat.job_store(), parts, None
        if self._store is not None:
            self._key = _next(f"checked/{structure(graph)}")
            self._store.add(f"{self._key}/announced", 1)

    _mine: dict[int, str] | None

    def post(self, found: dict[int, str]) -> None:
        """Say what was found: why parts, by number, are not to be changed."""
        self._mine = found
        if self._store is None:
            return
        for part, reason in found.items():
            self._store.set(f"{self._key}/why {part}", f"on rank {compat.rank()}, {reason}")
            self._store.add(f"{self._key}/found {part}", 1)
        self._store.add(f"{self._key}/posted", 1)

    def outcome(self, call: int, *, is_last: bool, holds: bool = False) -> dict[int, str] | None:
        """What all ranks have found, once it counts; None while it does not. `call` is the number of the next call.

        It counts when every rank that checks the graph has posted, or once a rank waits for no others (is_last). A rank
        that cannot change over yet (holds) does not decide that it counts, but takes what another one has decided.

        Raises FailedAlone if this rank has found something that does not count any more.
        """
        if self._store is None:
            return self._mine
        counts = self._mine is not None and not holds and (is_last or self._all_have_posted())
        proposed = self._proposed() if counts else "on"
        verdict = self._store.compare_set(f"{self._key}/call {call}", "", proposed).decode()
        if verdict == "on":
            return None
        found = [int(part) for part in verdict.split()[1:]]
        for part, reason in (self._mine or {}).items():
            if part not in found:
                raise FailedAlone(
                    f"rank {compat.rank()} would leave a site alone that other ranks of this job rewrite: {reason}"
                )
        return {part: self._store.get(f"{self._key}/why {part}").decode() for part in found}

    def _all_have_posted(self) -> bool:
        return int(self._store.add(f"{self._key}/posted", 0)) >= int(self._store.add(f"{self._key}/announced", 0))

    def _proposed(self) -> str:
        found = [part for part in range(self._parts) if self._store.add(f"{self._key}/found {part}", 0)]
        return " ".join(map(str, ["found", *found]))


def _next(key: str) -> str:
    """The key with a number that says how often this rank has asked for it."""
    _announced[compat.rank(), key] += 1
    return f"{key}/{_announced[compat.rank(), key]}"


def structure(graph: fx.Graph) -> str:
    """Equal for the graphs of one program: neither sizes nor a rank's own numbers or devices are in it."""
    calls = [f"{node.op} {_name(node.target)}" if node.op.startswith("call_f") else node.op for node in graph.nodes]
    return digest("\n".join(calls))


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", type(target).__name__))
