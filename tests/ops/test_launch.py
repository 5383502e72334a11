"""mhc::_launch in a graph that Inductor compiles: what it writes are arguments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config

import mhc_compile.ops  # noqa: F401  (registers it)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The operator doubles and adds where there are no kernels."""

    def launch(text: str, written: list[Tensor], read: list[Tensor], sizes: list[int]) -> None:
        assert (text, sizes) == ("text", [5])
        written[0].copy_(2 * read[0])
        written[1].add_(read[1])

    library = torch.library.Library("mhc", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_launch", launch, "CPU")  # type: ignore[no-untyped-call]
    yield
    library._destroy()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("fresh_dynamo", "on_cpu")
def test_inductor_orders_what_reads_after_what_writes() -> None:
    """New memory, and memory of the graph's own that the launch reads as well."""
    aten = torch.ops.aten

    def insert(graph: fx.Graph) -> None:
        (sin,) = graph.find_nodes(op="call_function", target=aten.sin.default)
        (cos,) = graph.find_nodes(op="call_function", target=aten.cos.default)
        value = sin.meta["val"]
        with graph.inserting_before(sin):
            options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            room = graph.call_function(aten.empty.memory_format, (list(value.shape),), options)
            args = "text", [room, cos], [sin.args[0], cos], [5]
            launch = graph.call_function(torch.ops.mhc._launch.default, args)
        room.meta["val"], launch.meta["val"] = value, None
        sin.replace_all_uses_with(room)
        graph.erase_node(sin)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        cos = torch.cos(x)
        return torch.sin(x) + cos, (cos + 1).sum()

    x = torch.randn(5, 7)
    # Patched as the module offers it: what pytest's monkeypatch undoes, it hides from everyone after.
    with config.patch(post_grad_custom_post_pass=insert):
        total, reduced = torch.compile(function)(x)
    torch.testing.assert_close(total, 2 * x + 2 * torch.cos(x))
    torch.testing.assert_close(reduced, (2 * torch.cos(x) + 1).sum())
