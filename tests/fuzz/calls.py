"""How a program is compiled and called: its sizes, which of them are dynamic, gradients, and what runs its graphs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tests.fuzz.program import Pick

# Kinds in which it matters what shares memory.
OBSERVED = {"writes", "aliasing outputs", "detach beside", "copied streams"}
# One in fifty goes through Inductor itself, which takes as long as thirty others.
INDUCTOR = (False,) * 49 + (True,)
# One in five hundred runs on a GPU.
DEVICES = ("cpu",) * 499 + ("cuda",)


def draw_sizes(pick: Pick, features: Collection[str], n: int) -> dict[str, int]:
    """The sizes of batch, sequence, streams, channels and tokens, by the letters of a layout."""
    one = [1, 1, 1, 2] if "one token" in features else [1, 2, n] if "rows by index" in features else [2, n]
    observed = [1, 1, 1] if OBSERVED & set(features) else []  # with one token much more is a view
    sizes = {
        "b": pick(one),
        "s": pick([1] if "one token" in features else [3, n, 5, 3, 141, *observed]),
        "n": n,
        "c": pick([6, n, 8]),
        "t": pick([1] if "one token" in features else [5, n, 5, n, 150, *observed]),
    }
    sizes["d"] = n * sizes["c"]
    return sizes


def draw_calls(pick: Pick, features: list[str], letters: tuple[str, ...], sizes: dict[str, int]) -> dict[str, Any]:
    """What `Program` takes besides source, shape and dtype; letters are those of each input's dimensions.

    Appends to the features what it draws.
    """
    mode = pick(["training"] * 6 + ["no_grad", "inference"] * (2 if OBSERVED & set(features) else 1))
    if mode != "training":
        features.append("without gradients")
    drawn: dict[str, Any] = {"mode": mode, "inductor": pick(INDUCTOR), "seed": pick(range(100))}
    if len(letters) > 1:
        drawn["extra"] = tuple(tuple(sizes[letter] for letter in one) for one in letters[1:])
    if "process group" in features:
        drawn["ranks"] = 2
    else:
        drawn["device"] = pick(DEVICES)
    if mode == "training" and pick([False] * 7 + [True]):
        drawn["flips"] = True
        features.append("calls with other gradients")
        same = tuple(tuple(sizes[letter] for letter in one) for one in letters)
        drawn["later"] = (same, same)
    if "dynamic sizes" not in features:
        return drawn
    drawn["dynamic"] = pick([True, True, None])
    if pick([False, True]):
        drawn["duck"] = False
        features.append("without duck shapes")
    if pick([False, True]):
        every = [(index, axis) for index, one in enumerate(letters) for axis in range(len(one))]
        drawn["marked"] = tuple(sorted({pick(every) for _ in range(pick([1, 2, 3]))}))
        features.append("marked sizes")
    later = []
    for _ in range(pick([0, 1, 1, 2])):
        other = {letter: pick([size, size + 1, size + 2, 1, 7]) for letter, size in sizes.items() if letter in "bst"}
        later.append(tuple(tuple((sizes | other)[letter] for letter in one) for one in letters))
    if later:
        drawn["later"] = drawn.get("later", ()) + tuple(later)
        features.append("calls of other sizes")
    return drawn
