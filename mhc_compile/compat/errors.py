"""Errors that Dynamo and Inductor hand to the caller of a compiled function as they are. It imports Dynamo."""

from __future__ import annotations

import sys
from typing import Any

from torch._dynamo.exc import ShortenTraceback


class Unwrapped(ShortenTraceback):
    """An error that reaches the caller of a compiled function under its own type.

    Dynamo wraps what a backend raises in a `BackendCompilerFailed`, but for a few classes of its own (torch 2.11 to
    2.14), of which this is one. It is raised where it is made: the traceback begins there.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, first_useful_frame=sys._getframe(1))
