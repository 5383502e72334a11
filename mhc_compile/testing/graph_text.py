"""Rewritten graphs as text, for snapshot tests of one's own model.

The text names the hyper-connection operators, what each reads and with which settings. Everything else in the graph
is left out but for where values come from, so that it changes when the rewriting changes and not with torch's version.
"""

from __future__ import annotations

import linecache
import operator
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mhc_compile import compat, passes, records
from mhc_compile.arguments import check_model
from mhc_compile.passes.report import Report

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


class EmptyCaptureError(ValueError):
    """A captured model has no hyper-connection operator. The message has the report, which says what was declined."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return (
            "the captured graphs have no hyper-connection operator, so that their snapshot would never change; "
            f"pass allow_empty=True if that is meant\n{self.report}"
        )


@dataclass
class Graphs:
    """The graphs of one call of a model: dynamo after rewriting, joint (forward and backward in one) after fusing.

    losses says, by the number of the graph that follows, what Dynamo cuts there and what it does not compile.
    """

    dynamo: list[fx.Graph] = field(default_factory=list)
    joint: list[fx.Graph] = field(default_factory=list)
    losses: list[tuple[int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for number, graph in enumerate([*self.dynamo, None]):
            lines += [words for before, words in self.losses if before == number]
            lines += [graph_text(graph)] if graph is not None else []
        return "\n".join(lines)


def capture(model: Callable[..., Any], /, *args: Any, allow_empty: bool = False, **kwargs: Any) -> Graphs:
    """Run `model(*args, **kwargs)` once and return its rewritten graphs.

    The graphs have the sizes of these arguments, whatever sizes the model was compiled for before in this process. The
    model may be compiled already. Without gradients, the joint graphs hold the forward pass alone. All options have
    their defaults. So the norm of a layer input is part of its operator on a GPU, and not on a CPU.

    The text has a line for each graph break, for each function that Dynamo gives up on, and for each that reaches a
    limit of Dynamo's, with the function's name. A break has the code of its line, too, but no number: that would change
    with other lines of the file. Operators after such a line are not fused with operators before it.
    `recompile_limit` is lifted, because each of the sizes has a graph of its own here.

    Raises EmptyCaptureError if no graph has a hyper-connection operator, unless `allow_empty` is given, and TypeError
    if model is a class or cannot be called.
    """
    check_model(model)
    graphs, ledger = Graphs(), records.Ledger()

    def mhc(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with ledger.graph() as graph:
            if not compat.is_part():
                rewrite(gm, graph)
            compiled: Callable[..., Any] = compat.compile_without_inductor(gm, example_inputs, fuse)
        return compiled

    def rewrite(gm: fx.GraphModule, graph: records.Compiled) -> None:
        graph.traced.add(passes.run_recursively(gm))
        if graph.before is not None and graph.before.frame != compat.compile_id()[0]:
            lose(f"cut: Dynamo breaks the graph in {graph.before.function[0]}{_at(graph.before)}")
        graphs.dynamo.append(gm.graph)

    def whole(gm: fx.GraphModule) -> None:
        with ledger.graph() as graph:
            rewrite(gm, graph)

    def given_up(function: compat.GivenUp) -> None:
        if ledger.give_up(function):
            lose(f"not compiled: Dynamo gives up on {function.function}{_at(function.broken)}")

    def lose(words: str) -> None:
        graphs.losses.append((len(graphs.dynamo), words))

    def fuse(joint: fx.GraphModule) -> None:
        passes.fuse(joint)
        graphs.joint.append(joint.graph)

    def reach_limit(frame: Any, limit: compat.RecompileLimit) -> None:
        ledger.reach_limit(frame, limit)
        lose(f"not compiled any more: {limit.function} reaches {limit.limit}")

    look = compat.apart(mhc, given_up, reach_limit), compat.whole_for(mhc, whole)
    with look[0], look[1], compat.for_these_sizes(), compat.uncompiled(model):
        torch.compile(model, backend=mhc)(*args, **kwargs)
    report = ledger.report()
    if not (allow_empty or report.rewritten or report.called):
        raise EmptyCaptureError(report)
    return graphs


def _at(broken: compat.GraphBreak) -> str:
    """The code where Dynamo breaks a graph, if it is not torch's, which changes with its version."""
    code = "" if broken.file.startswith(_TORCH) else linecache.getline(broken.file, broken.line).strip()
    return f", at {code}" if code else ""


def graph_text(graph: fx.Graph) -> str:
    """The hyper-connection operators of a graph, in program order:

        %0 = generate_mix_and_aggregate(x=bf16[2, 8, 4, 64], phi=f32[24, 256], ..., rms_eps=1e-05)
        %1 = expand_combine(f=bf16[2, 8, 64](%0.0), h_post=%0.1, x=bf16[2, 8, 4, 64], h_res=%0.2)

    An operand is a result (%0.1 is the second of %0), its type with the results that other code computed it from, or
    its type alone. Settings equal to the operator's defaults are left out. The last line, `return %1`, has the results
    from which the graph's outputs are computed; it is `return` alone if no operator has a part in them. A nested graph
    with operators, as of a checkpoint region, is one value, and stands below it:

        %2 = region(%1):
            %3 = head(x=bf16[2, 8, 4, 64], phi=f32[4, 256], scale=f32[1], bias=f32[4])
            return %3

    Raises TypeError for anything but a graph, such as what `capture` returns: `str` makes the text of that.
    """
    if not isinstance(graph, fx.Graph):
        hint = "; str(...) is the text of what capture returns" if isinstance(graph, Graphs) else ""
        raise TypeError(f"graph: expected a torch.fx.Graph, got {type(graph).__name__}{hint}")
    return "\n".join(_Text().lines(graph))


class _Text:
    def __init__(self) -> None:
        self.names: dict[fx.Node, str] = {}
        self.origins: dict[fx.Node, tuple[str, ...]] = {}
        self.count = 0

    def lines(self, graph: fx.Graph) -> list[str]:
        lines = []
        for node in graph.nodes:
            if _is_ours(node):
                lines.append(self._line(node))
            elif node.target is operator.getitem and node.args[0] in self.names:
                self.names[node] = f"{self.names[node.args[0]]}.{node.args[1]}"
                self.origins[node] = (self.names[node],)
            elif node.op == "output":
                lines.append(f"return {', '.join(self._read(node))}".rstrip())
            elif _has_operators(node):
                lines += self._region(node)
            else:
                self.origins[node] = self._read(node)
        return lines

    def _read(self, node: fx.Node) -> tuple[str, ...]:
        """The results of operators from which a node's arguments were computed."""
        return tuple(dict.fromkeys(o for n in node.all_input_nodes for o in self.origins.get(n, ())))

    def _named(self, node: fx.Node) -> str:
        name = f"%{self.count}"
        self.count += 1
        self.names[node] = name
        self.origins[node] = (name,)
        return name

    def _region(self, node: fx.Node) -> list[str]:
        """A node that runs nested graphs, with the text of each."""
        read = ", ".join(self._read(node))
        lines = [f"{self._named(node)} = region({read}):"]
        for body in compat.bodies(node):
            lines += [textwrap.indent(line, "    ") for line in self.lines(body.graph)]
        return lines

    def _line(self, node: fx.Node) -> str:
        name, target = self._named(node), compat.called_operator(node)
        assert target is not None
        arguments = target._schema.arguments
        values = {a.name: v for a, v in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
        tensors, settings = [], []
        for argument in arguments:
            value = values.get(argument.name, argument.default_value)
            if argument.kwarg_only or not isinstance(value, (fx.Node, type(None))):
                if not argument.has_default_value() or value != argument.default_value:
                    settings.append(f"{argument.name}={value}")
            elif value is not None:
                tensors.append(f"{argument.name}={self._operand(value)}")
        line = f"{name} = {target._opname}({', '.join([*tensors, *settings])})"
        return textwrap.fill(line, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)

    def _operand(self, node: fx.Node) -> str:
        if node in self.names:
            return self.names[node]
        origins = self.origins.get(node, ())
        return f"{_type(node)}({', '.join(origins)})" if origins else _type(node)


def _has_operators(node: fx.Node) -> bool:
    """Whether a node runs nested graphs that have hyper-connection operators."""
    inner = (each for body in compat.bodies(node) for each in body.graph.nodes) if compat.is_higher_order(node) else ()
    return any(_is_ours(each) or _has_operators(each) for each in inner)


def _is_ours(node: fx.Node) -> bool:
    target = compat.called_operator(node)
    return target is not None and target.namespace == "mhc"


def _type(node: fx.Node) -> str:
    value = node.meta.get("example_value", node.meta.get("val"))
    if not isinstance(value, torch.Tensor):
        return "?"
    shape = ", ".join(str(size) if isinstance(size, int) else "s" for size in value.shape)
    return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{shape}]"
