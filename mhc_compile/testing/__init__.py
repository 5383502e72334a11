"""Tools for testing models and rewritten graphs: snapshots, and float64 references."""

from mhc_compile.testing.draws import KeepDraws, ReplayDraws
from mhc_compile.testing.float64 import Float64Reference, KeepFloat64
from mhc_compile.testing.graph_text import EmptyCaptureError, Graphs, capture, graph_text
from mhc_compile.testing.judging import Errors, Finding, judge

__all__ = [
    "EmptyCaptureError",
    "Errors",
    "Finding",
    "Float64Reference",
    "Graphs",
    "KeepDraws",
    "KeepFloat64",
    "ReplayDraws",
    "capture",
    "graph_text",
    "judge",
]
