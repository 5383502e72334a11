"""The torch that is here, and the newest one that was tested."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)

# pyproject.toml has the oldest torch; continuous integration runs the whole suite with this one.
NEWEST_TESTED = "2.14"


def tell_if_untested() -> None:
    """Say that this torch is newer than the tested ones."""
    release = torch.__version__.split("+")[0]
    if tuple(map(int, release.split(".")[:2])) > tuple(map(int, NEWEST_TESTED.split("."))):
        log.warning("torch %s is newer than %s, the newest that mhc_compile was tested with", release, NEWEST_TESTED)
