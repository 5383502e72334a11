"""Checks of what a user gives to the functions that run a model."""

from __future__ import annotations


def check_model(model: object) -> None:
    """Refuse what cannot be called as a model, before Dynamo sees it.

    After `torch.compile` of a class, the process can no longer compile the instances of that class.
    """
    if isinstance(model, type):
        raise TypeError(f"model: got the class {model.__name__}; expected an instance, such as {model.__name__}(...)")
    if not callable(model):
        raise TypeError(f"model: expected a callable such as an nn.Module, got {type(model).__name__}")
