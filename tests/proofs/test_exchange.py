"""The exchange of `kernels.boundary_pass`, where tiles are drawn, in every order in which its steps can happen.

A model of one team: its programs begin one after the other, as far as there is room; each has the three parts that the
kernel has, and each part takes one step at a time. Other teams are an environment, which may draw a tile at any time. A
clock may run out at any time. In each state something can happen, or all programs have ended. What is read is what was
meant, and full teams do all tiles that they have drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import pytest


@dataclass(frozen=True)
class Kernel:
    """The numbers of a kernel, and what a mutant does otherwise."""

    ranks: int = 2
    tiles: int = 3
    room: int = 2
    lag: int = 1
    ahead: int = 1
    draws: int = 2
    rounds: int = 1  # programs take turns in adding up
    ring: int = 5
    slots: int = 2
    gives_up: bool = True
    counts_in_early: bool = False
    waits_for_gates: bool = True


class Program(NamedTuple):
    """One program: how far it has come, and each of its parts, by turn and step; None where it does not work."""

    begun: str = "not yet"
    stream: tuple[int, int] | None = None
    announce: tuple[int, int] | None = None
    add_up: tuple[int, int] | None = None
    done: tuple[int, ...] = ()


class State(NamedTuple):
    programs: tuple[Program, ...]
    tickets: int = 0
    state: int = 0  # of the team: 1 it is full, 2 it has given up
    drawn: int = 0
    held: int | None = None  # what the last program has drawn and not yet told
    order: tuple[int, ...] = ()  # tiles of turns, as told
    counts: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()  # of which turn a slot has each program's part
    gates: tuple[tuple[int, ...], ...] = ()


class Wrong(AssertionError):
    """What the exchange must not do."""


def _start(k: Kernel) -> State:
    nothing = ((-1,) * k.ranks,) * k.slots
    return State((Program(),) * k.ranks, counts=(0,) * k.slots, parts=nothing, gates=nothing)


Value = TypeVar("Value")


def _set(values: tuple[Value, ...], place: int, value: Value) -> tuple[Value, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _tile(k: Kernel, s: State, turn: int) -> int | None:
    """What a program that asks for a turn's tile finds; None: nothing, or another turn's in its place."""
    return s.order[turn] if turn < len(s.order) <= turn + k.ring else None


def _told(k: Kernel, s: State, tile: int) -> State:
    return s._replace(order=(*s.order, min(tile, k.tiles)))


def _begin(k: Kernel, s: State, rank: int) -> Iterator[State]:
    """Up to where the three parts of a program begin."""
    p = s.programs[rank]

    def to(state: State, **changes: Any) -> State:
        return state._replace(programs=_set(state.programs, rank, p._replace(**changes)))

    here = sum(one.begun not in ("not yet", "ended") for one in s.programs)
    if p.begun == "not yet" and s.tickets == rank and here < k.room:
        last = rank == k.ranks - 1
        yield to(s._replace(tickets=rank + 1), begun="last" if last else "waits")
    elif p.begun == "last":
        if s.state:
            yield to(s, begun="waits")
        else:
            drawn = s._replace(state=1, drawn=s.drawn + k.draws)
            for tile in range(s.drawn, s.drawn + k.draws):
                drawn = _told(k, drawn, tile)
            yield to(drawn, begun="waits")
    elif p.begun == "waits":
        if k.gives_up and s.state == 0:
            yield s._replace(state=2)
        if s.state == 2:
            yield to(s, begun="ended")
        elif s.state == 1:
            first = _tile(k, s, 0)
            if first is not None and _tile(k, s, k.ahead) is not None:
                works = first < k.tiles
                parts = {"stream": (0, 0), "announce": (0, 0), "add_up": (rank % k.rounds, -1)} if works else {}
                yield to(s, begun="works" if works else "ended", **parts)


def _stream(k: Kernel, s: State, rank: int) -> Iterator[State]:
    p = s.programs[rank]
    if p.stream is None:
        return
    turn, step = p.stream
    slot, there = turn % k.slots, turn < len(s.order) and s.order[turn] < k.tiles

    def to(state: State, stream: tuple[int, int] | None, done: tuple[int, ...] = p.done) -> State:
        return state._replace(programs=_set(state.programs, rank, p._replace(stream=stream, done=done)))

    if step == 0:
        yield to(s._replace(parts=_set(s.parts, slot, _set(s.parts[slot], rank, turn))) if there else s, (turn, 1))
    elif step == 1:
        if not there or _tile(k, s, turn + k.ahead + 1) is not None:
            yield to(s, (turn, 2))
    else:
        then, done = turn - k.lag, p.done
        if then >= 0:
            adders = range(then % k.rounds, k.ranks, k.rounds)
            if k.waits_for_gates and any(s.gates[then % k.slots][adder] != then for adder in adders):
                return
            done = (*done, s.order[then])
        end = next((t for t, tile in enumerate(s.order) if tile >= k.tiles), None)
        over = end is not None and turn + 1 >= end + k.lag
        yield to(s, None if over else (turn + 1, 0), done)


def _announce(k: Kernel, s: State, rank: int) -> Iterator[State]:
    p = s.programs[rank]
    if p.announce is None:
        return
    turn, step = p.announce
    draws = rank == k.ranks - 1

    def to(state: State, announce: tuple[int, int] | None) -> State:
        return state._replace(programs=_set(state.programs, rank, p._replace(announce=announce)))

    if step == 0:
        yield to(s._replace(held=s.drawn, drawn=s.drawn + 1) if draws else s, (turn, 1))
    elif step == 1:
        if draws:
            assert s.held is not None
            s = _told(k, s, s.held)._replace(held=None)
        yield to(s, (turn, 2))
    elif step == 2:
        stored = p.stream is None or p.stream >= (turn, 1)
        if stored or k.counts_in_early:
            slot = turn % k.slots
            yield to(s._replace(counts=_set(s.counts, slot, s.counts[slot] + 1)), (turn, 3))
    else:
        tile = _tile(k, s, turn + 1)
        if tile is not None:
            yield to(s, (turn + 1, 0) if tile < k.tiles else None)


def _add_up(k: Kernel, s: State, rank: int) -> Iterator[State]:
    """Each program has some tokens of each tile, or of the tiles of its turns."""
    p = s.programs[rank]
    if p.add_up is None:
        return
    turn, step = p.add_up
    slot = turn % k.slots

    def to(state: State, add_up: tuple[int, int] | None) -> State:
        return state._replace(programs=_set(state.programs, rank, p._replace(add_up=add_up)))

    if step == -1:
        tile = _tile(k, s, turn)
        if tile is not None:
            yield to(s, (turn, 0) if tile < k.tiles else None)
    elif step == 0:
        if s.counts[slot] >= k.ranks * (turn // k.slots + 1):
            yield to(s, (turn, 1))
    elif step <= k.ranks:
        if s.parts[slot][step - 1] != turn:
            raise Wrong("a part of another turn is added up")
        yield to(s, (turn, step + 1))
    else:
        yield to(s._replace(gates=_set(s.gates, slot, _set(s.gates[slot], rank, turn))), (turn + k.rounds, -1))


def _steps(k: Kernel, s: State) -> Iterator[State]:
    for rank, p in enumerate(s.programs):
        if p.begun != "works":
            yield from _begin(k, s, rank)
        elif p[1:4] == (None, None, None):
            yield s._replace(programs=_set(s.programs, rank, p._replace(begun="ended")))
        else:
            for part in (_stream, _announce, _add_up):
                yield from part(k, s, rank)


def _explore(k: Kernel) -> tuple[int, set[int]]:
    """How many states there are, and how many tiles were drawn in the ends. Raises Wrong."""
    begin = _start(k)
    seen, left, ends = {begin}, [begin], set()
    while left:
        s = left.pop()
        following = list(_steps(k, s))
        if not following:
            _check_end(k, s)
            ends.add(min(s.drawn, k.tiles))
        if s.drawn < k.tiles:  # another team
            following.append(s._replace(drawn=s.drawn + 1))
        for one in following:
            if one not in seen:
                seen.add(one)
                left.append(one)
    return len(seen), ends


def _check_end(k: Kernel, s: State) -> None:
    if any(p.begun != "ended" for p in s.programs):
        raise Wrong("programs wait for each other")
    for p in s.programs:
        if list(p.done) != [tile for tile in s.order if tile < k.tiles]:
            raise Wrong("a tile that was drawn is not done")


TWO = Kernel()
CASES = {
    "two programs": TWO,
    "room for one": replace(TWO, room=1),
    "a longer lag": replace(TWO, lag=2, slots=3, draws=3, ring=7),
    "turns": replace(TWO, rounds=2),
    "no tiles": replace(TWO, tiles=0),
    "one tile": replace(TWO, tiles=1),
    "three programs": replace(TWO, ranks=3, room=3, tiles=1),
    "three programs, room for two": replace(TWO, ranks=3, room=2),
}


LONG = ("a longer lag", "three programs")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in LONG else []) for c in CASES])
def test_in_every_order(case: str) -> None:
    states, ends = _explore(CASES[case])
    assert states > 10
    # Without other teams, and with those that draw all.
    assert max(ends) == CASES[case].tiles
    if CASES[case].room < CASES[case].ranks:
        assert min(ends) == 0  # which leaves all tiles to the second kernel


@pytest.mark.parametrize(
    ("mutant", "wrong"),
    [
        ({"slots": 1}, "another turn|wait for each other"),
        ({"gives_up": False, "room": 1}, "wait for each other"),
        ({"counts_in_early": True}, "another turn"),
        ({"waits_for_gates": False}, "another turn|wait for each other"),
        ({"draws": 1}, "wait for each other"),
        ({"rounds": 2, "ahead": 0, "draws": 1}, "wait for each other"),
        ({"tiles": 4, "ring": 4}, "wait for each other"),
    ],
    ids=str,
)
def test_it_finds_what_is_wrong(mutant: dict[str, Any], wrong: str) -> None:
    with pytest.raises(Wrong, match=wrong):
        _explore(replace(TWO, **mutant))
