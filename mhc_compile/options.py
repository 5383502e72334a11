"""Every option of the backend: its name, the values it takes, its default, and what it does; and their checks.

`torch.compile(model, backend="mhc", options={...})` and `mhc_compile.enable(options={...})` take them. docs/options.md
is generated from this table.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mhc_compile.guard import Deliberate
from mhc_compile.passes.fuse import check_layers

PREFIX = "mhc."
CHECK = "mhc.check"
FUSE = "mhc.fuse."
INPUT_NORM = FUSE + "input_norm"
MXFP8 = FUSE + "mxfp8"
SKIP = "mhc.skip"


@dataclass(frozen=True)
class Option:
    """One option. values and meaning are in words, for people; the backend checks what it is given."""

    name: str
    values: str
    default: Any
    meaning: str


TABLE = (
    Option(
        "mhc.strict",
        "bool",
        False,
        "Raise `StrictError` if a site is declined, cut or not compiled. Also raise it if a pass fails, or if Dynamo "
        "gives up on a function that may hold a hyper-connection.",
    ),
    Option(
        "mhc.check",
        "bool",
        False,
        "Compare each site with the program's own code in the first calls. Leave a site alone if its operator is less "
        "accurate. `mhc_compile.enable` does not take this option.",
    ),
    Option(
        "mhc.skip",
        'list of "file.py:12"',
        (),
        "Leave the sites at these lines alone. Strict mode then accepts a site that is left at one of these lines, for "
        "whatever reason. The line of a function's `def` stands for the whole function, if Dynamo gives up on it or "
        "reaches its recompile limit.",
    ),
    Option(
        "mhc.recompute",
        '"auto", int >= 1 or None',
        None,
        "Keep the streams of every k-th sublayer for the backward pass, and compute the others again. "
        '"auto" chooses k. None keeps all streams.',
    ),
    Option(
        "mhc.share_layers",
        "bool",
        True,
        "Compile identical sublayers once.",
    ),
    Option(
        "mhc.lower",
        "bool",
        True,
        "Replace operators in the compiled graph by their kernels or loops. False keeps each operator as one call from "
        "Python.",
    ),
    Option(
        "mhc.fuse.accumulate",
        "bool",
        True,
        "Add the gradients of streams with several readers inside the last backward operator.",
    ),
    Option(
        "mhc.fuse.boundary",
        "bool",
        True,
        "Fuse the write of one sublayer with the read of the next, in the forward pass.",
    ),
    Option(
        "mhc.fuse.boundary_backward",
        "bool",
        True,
        "Fuse the backward operators of that write and that read.",
    ),
    Option(
        "mhc.fuse.shifted_boundary",
        "bool",
        True,
        "Fuse a write, the next read and the next projection, in the forward pass, if the read uses gates that were "
        "made before the write.",
    ),
    Option(
        "mhc.fuse.shifted_boundary_backward",
        "bool",
        True,
        "Fuse the backward operators of these three.",
    ),
    Option(
        "mhc.fuse.combine_and_read",
        "bool",
        True,
        "Fuse a write with what reads its streams without gates of their own, in the forward pass: a projection whose "
        "gates no operator makes, or a read with gates that were made before the write.",
    ),
    Option(
        "mhc.fuse.combine_and_read_backward",
        "bool",
        True,
        "Fuse the backward operators of these.",
    ),
    Option(
        "mhc.fuse.input_norm",
        "bool or None",
        None,
        "Compute the RMS norm at the start of a sublayer inside the operator that makes the sublayer's input. "
        "None does so on GPUs only.",
    ),
    Option(
        "mhc.fuse.mxfp8",
        "bool",
        False,
        "If the sublayer quantizes its normed input in MXFP8, have the operator's kernel store it so, on Hopper and "
        "Blackwell. Off by default, since it was no faster on an H200.",
    ),
)

_NAMES = [option.name.removeprefix(PREFIX) for option in TABLE]
OPTIONS: dict[str, Any] = {option.name: option.default for option in TABLE}


class OptionError(Deliberate, ValueError):
    """A wrong option or mode. `torch.compile` does not read them; the first call of the compiled model raises this."""


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours, and those of Inductor. Raises ValueError for what ours cannot be."""
    if not isinstance(options, Mapping):
        raise ValueError(f"options: expected a dict such as {{'mhc.strict': True}}, got {options!r}")
    own = {key: value for key, value in options.items() if str(key).startswith(PREFIX)}
    for key in options:
        if key not in OPTIONS and (key in own or _looks_like_ours(str(key))):
            (near,) = difflib.get_close_matches(str(key).lower().removeprefix(PREFIX), _NAMES, 1) or [""]
            meant = f"did you mean {PREFIX + near!r}? " if near else ""
            known = ", ".join(sorted(OPTIONS))
            raise ValueError(f"options: unknown option {key!r}; {meant}expected one of {known}")
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
    return key.lower().startswith("mhc") or PREFIX + key.lower() in OPTIONS


def _places(given: Any) -> tuple[str, ...]:
    """The lines of the program that an option names; a tuple, which the keys of caches take."""
    places = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not isinstance(given, (list, tuple)) or not all(_is_place(place) for place in places):
        raise ValueError(f"options: {SKIP!r} is {given!r}; expected a list of places such as 'model.py:12'")
    return places


def _is_place(place: Any) -> bool:
    return isinstance(place, str) and re.fullmatch(r".+:[0-9]+", place) is not None
