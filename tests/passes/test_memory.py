"""Which values of a graph share memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mhc_compile.passes.memory import Memory


def test_views_share_memory_whether_their_schemas_say_so_or_not() -> None:
    aten = torch.ops.aten

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = aten.sin.default(x)
        return aten.transpose.int(y, 0, 1), aten._unsafe_view.default(y, [6]), aten.cos.default(y)

    graph = make_fx(program, tracing_mode="fake")(torch.randn(2, 3)).graph
    x, y, transposed, flat, other, _ = graph.nodes
    memory = Memory(graph)
    assert memory.is_shared(y, transposed)
    assert memory.is_shared(y, flat)
    assert memory.is_shared(transposed, flat)
    assert not memory.is_shared(x, y)
    assert not memory.is_shared(y, other)
