"""The torch that is installed, and the newest one that was tested."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)

# pyproject.toml asks for this torch or a newer one.
OLDEST = "2.11"
# The newest torch that continuous integration tests with.
NEWEST_TESTED = "2.14"


def is_newer_than_tested() -> bool:
    """Whether this torch is newer than the tested ones."""
    return _numbers(_release()) > _numbers(NEWEST_TESTED)


def is_older_than(version: str) -> bool:
    """Whether this torch is older than a version such as "2.13"."""
    return _numbers(_release()) < _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _release() -> str:
    return torch.__version__.split("+")[0]


def tell_if_untested() -> None:
    """Say that this torch is newer than the tested ones."""
    if is_newer_than_tested():
        log.warning("torch %s is newer than %s, the newest that mhc_compile was tested with", _release(), NEWEST_TESTED)
