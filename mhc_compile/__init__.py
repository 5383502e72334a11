"""Manifold-constrained hyper-connections (arXiv 2512.24880), found in eager PyTorch models and made fast.

torch.compile(model, backend="mhc")     rewrites and compiles an unmodified model
mhc_compile.enable()                    does so for every torch.compile of the process
mhc_compile.explain(model, *args)       says what would be rewritten, what would not, and why
mhc_compile.report()                    says what was rewritten in all that this process has compiled
mhc_compile.verify(model, *args)        compares eager, Inductor and mhc with float64, gradients included
mhc_compile.ops                         the operators themselves
mhc_compile.testing                     snapshots of rewritten graphs, float64 references
mhc_compile.nn                          the connections as plain PyTorch modules
mhc_compile.checkpoints                 their parameters, to and from the layouts of other libraries
mhc_compile.distributed                 their parameters beside FSDP2, and their streams as DTensors
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mhc_compile import ops

if TYPE_CHECKING:
    from mhc_compile import backend, checkpoints, distributed, nn, testing
    from mhc_compile.backend import disable, enable, is_enabled
    from mhc_compile.explanation import explain
    from mhc_compile.hooks import StrictError
    from mhc_compile.passes.report import Report, SiteReport
    from mhc_compile.records import report
    from mhc_compile.verification import Verification, VerificationError, verify

__version__ = "0.1.0"
# Raised by a release whose operators give other bits for the same arguments: CHANGELOG.md says which, under "Numerics".
__numerics__ = 1

# No module has the name of something in it: its import would put the module in the place of the function `explain`.
# What needs Dynamo is imported at its first use: it takes seconds, and whoever calls the operators has no need of it.
_LAZY = {
    "StrictError": "hooks",
    "disable": "backend",
    "enable": "backend",
    "is_enabled": "backend",
    "explain": "explanation",
    "Report": "passes.report",
    "SiteReport": "passes.report",
    "report": "records",
    "Verification": "verification",
    "VerificationError": "verification",
    "verify": "verification",
}


_MODULES = ("backend", "checkpoints", "distributed", "nn", "testing")
# The names of `mhc_compile.testing`, which would take long to import for a message.
_IN_TESTING = (
    "EmptyCaptureError", "Errors", "Finding", "Float64Reference", "Graphs", "KeepDraws", "KeepFloat64", "ReplayDraws",
    "capture", "graph_text", "judge",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mhc_compile.{name}")
    if name not in _LAZY:
        elsewhere = f"; it is mhc_compile.testing.{name}" if name in _IN_TESTING else ""
        raise AttributeError(f"module 'mhc_compile' has no attribute {name!r}{elsewhere}")
    value = getattr(importlib.import_module(f"mhc_compile.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})


__all__ = [
    "Report",
    "SiteReport",
    "StrictError",
    "Verification",
    "VerificationError",
    "__numerics__",
    "__version__",
    "backend",
    "checkpoints",
    "disable",
    "distributed",
    "enable",
    "explain",
    "is_enabled",
    "nn",
    "ops",
    "report",
    "testing",
    "verify",
]
