"""All near misses, in the order of their names, whatever a process has imported before."""

from tests.zoo import near_flat, near_forms, near_gates, near_mixing, near_streams, near_whole  # noqa: F401
from tests.zoo.near import registered

__all__ = ["MISSES"]

MISSES = dict(sorted(registered.items()))
