"""Where the kernel tests run: on CUDA (marked gpu), or under Triton's interpreter in a process of their own.

TRITON_INTERPRET decides when Triton is imported, for the whole process: it must not reach other tests, and compiling
needs it unset. So `test_in_interpreter.py` starts one pytest per module with it set; there it is not collected.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreter import make_fast

    collect_ignore = ["test_in_interpreter.py", "test_compiled.py"]
    make_fast()


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch of the host functions start as NaN, so that nothing is read before it is written."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """The names of the kernels in Gluon that the test launches."""
    # Not at the top: importing kernels imports Triton, which reads TRITON_INTERPRET.
    from tests.kernels.gluon import watched

    with watched() as names:
        yield names
