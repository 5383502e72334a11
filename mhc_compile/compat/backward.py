"""The backward pass, and what runs again in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch


def current_backward() -> int:
    """The number of the backward pass that this thread works for."""
    return torch._C._current_graph_task_id()


def after_backward(call: Callable[[], None]) -> None:
    """Have this called at the end of the current backward pass, after what was asked for before the end.

    FSDP2 asks for such a call, too, and may communicate in it: all ranks have to do so in the same order.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


def is_last_backward() -> bool:
    """Whether the current backward pass frees what was saved for it, so that it is the last (torch 2.11 to 2.14)."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def saves_by_hooks() -> bool:
    """Whether hooks save tensors for the backward pass, such as those of checkpointing (torch 2.11 to 2.14)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_in_function() -> bool:
    """Whether this runs in the forward or backward of an `autograd.Function`, with its ctx as the first argument."""
    frame = inspect.currentframe()
    while frame is not None:
        # To look at a frame's variables keeps them alive, so others are not looked at.
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if (
            frame.f_code.co_name in ("forward", "backward")
            and names
            and isinstance(frame.f_locals.get(names[0]), torch.autograd.function.FunctionCtx)
        ):
            return True
        frame = frame.f_back
    return False
