"""What a call of `mhc::_launch` or `mhc::_loop` is about, as text.

The code that calls these operators is kept on disk and read by other processes. It is JSON in single quotes: Inductor's
C++ does not escape double ones.
"""

from __future__ import annotations

import json
from typing import Any


def to_text(value: Any) -> str:
    """A JSON value whose strings hold no quotes; raises TypeError for what is none, such as a symbolic size."""
    return json.dumps(value).replace('"', "'")


def from_text(text: str) -> Any:
    """The value that `to_text` was given, with lists for tuples."""
    return json.loads(text.replace("'", '"'))
