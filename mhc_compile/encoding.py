"""Text that other processes read: what a call of `mhc::_launch` or `mhc::_loop` is about, and texts for people.

The code that calls these operators is kept on disk. It is JSON in single quotes: Inductor's C++ does not escape double
ones.
"""

from __future__ import annotations

import json
import re
from typing import Any

_LONGEST = 300
# Patterns are compiled when they are first used: for that, an import has no time.
_ADDRESS = r"( object)? at 0x[0-9a-fA-F]+"
# What torch quotes of a compiler before what the compiler says.
_COMMAND = r"(?s)Command:\n.*?\nOutput:\n"
# What moves a terminal's cursor, colours its text or turns the direction of it, and bytes that are no text.
_UNPRINTABLE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def to_text(value: Any) -> str:
    """A JSON value whose strings hold no single quotes.

    Raises TypeError for what JSON has no form for, such as a symbolic size, and ValueError for what would not come back
    as it is, such as a tuple.
    """
    text = json.dumps(value).replace('"', "'")
    if from_text(text) != value:
        raise ValueError(f"{value!r} is not what is read from its text, {text}")
    return text


def from_text(text: str) -> Any:
    """The value that `to_text` was given."""
    return json.loads(text.replace("'", '"'))


def printable(text: str) -> str:
    """The text as any file or terminal of UTF-8 takes it, for what programs name: files, modules, lines.

    A name may hold bytes that are no text, and what a terminal obeys. Both are shown by their codes.
    """
    return re.sub(_UNPRINTABLE, lambda found: _code(found[0]), text)


def printable_line(text: str) -> str:
    """The text within one line."""
    return printable(text).replace("\n", "\\n")


def _code(character: str) -> str:
    return character.encode("unicode_escape", errors="backslashreplace").decode()


def without_addresses(text: str) -> str:
    """The text of an object as it is in every process."""
    return re.sub(_ADDRESS, "", text)


def in_one_line(error: BaseException) -> str:
    """The type of an error and what it says."""
    try:
        words = without_addresses(" ".join(re.sub(_COMMAND, "", str(error)).split()))
    except Exception:  # what raises may not even be able to say why
        words = ""
    if len(words) > _LONGEST:
        words = words[:_LONGEST] + "..."
    name = type(error).__name__
    return printable(f"{name}: {words}" if words else name)
