"""The "mhc." options: which there are, what they are unless they are given, and which values they can have."""

from __future__ import annotations

from typing import Any

from mhc_compile.guard import Deliberate
from mhc_compile.passes import INPUT_NORMS
from mhc_compile.passes.fuse import FUSIONS, check_layers

PREFIX = "mhc."
FUSE = "mhc.fuse."
CHECK = "mhc.check"
INPUT_NORM = FUSE + "input_norm"
SKIP = "mhc.skip"
OPTIONS: dict[str, Any] = {"mhc.strict": False, CHECK: False} | {FUSE + name: True for name in FUSIONS}
OPTIONS |= {INPUT_NORM: INPUT_NORMS, "mhc.recompute": None, "mhc.share_layers": True, "mhc.lower": True}
OPTIONS |= {SKIP: ()}


class OptionError(Deliberate, ValueError):
    """A wrong option or mode. `torch.compile` does not read them; the first call of the compiled model raises this."""


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours, and those of Inductor. Raises ValueError for what ours cannot be."""
    own = {key: value for key, value in options.items() if str(key).startswith(PREFIX)}
    for key in options:
        if key not in OPTIONS and (key in own or _looks_like_ours(str(key))):
            raise ValueError(f"options: unknown option {key!r}; expected one of {', '.join(sorted(OPTIONS))}")
    for key in own:
        if isinstance(OPTIONS[key], bool) and not isinstance(own[key], bool):
            raise ValueError(f"options: {key!r} is {own[key]!r}; expected True or False")
        if key == INPUT_NORM and not isinstance(own[key], bool | None):
            raise ValueError(f"options: {key!r} is {own[key]!r}; expected True, False or None")
    check_layers(own.get("mhc.recompute"), "options: 'mhc.recompute'")
    if SKIP in own:
        own[SKIP] = _places(own[SKIP])
    return own, {key: value for key, value in options.items() if key not in own}


def _looks_like_ours(key: str) -> bool:
    """Whether an option of another name was to be one of ours: Inductor would list all of its own."""
    return key.startswith("mhc") or PREFIX + key in OPTIONS


def _places(given: Any) -> tuple[str, ...]:
    """The lines of the program that an option names; a tuple, which the keys of caches take."""
    places = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not isinstance(given, (list, tuple)) or not all(_is_place(place) for place in places):
        raise ValueError(f"options: {SKIP!r} is {given!r}; expected a list of places such as 'model.py:12'")
    return places


def _is_place(place: Any) -> bool:
    return isinstance(place, str) and place.rpartition(":")[2].isdigit()
