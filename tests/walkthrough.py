"""docs/how_it_works.md: one small model in every stage of its compilation, as the passes leave it.

python -m tests.walkthrough [path]      the path is docs/how_it_works.md if none is given
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition

from mhc_compile import passes
from mhc_compile.passes import shadow, sizes
from mhc_compile.passes.functional import functional
from mhc_compile.testing import graph_text

PATH = Path(__file__).resolve().parent.parent / "docs" / "how_it_works.md"
# B, S, n, C: the streams of 16 tokens.
SHAPE = (2, 8, 4, 32)


class HyperConnection(nn.Module):
    def __init__(self, layer: nn.Module, C: int, n: int = 4) -> None:
        super().__init__()
        self.layer, self.n = layer, n
        self.phi = nn.Parameter(torch.randn(n * n + 2 * n, n * C) / 16)
        self.scale = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.zeros(n * n + 2 * n))

    def forward(self, x: Tensor) -> Tensor:  # [..., n, C]
        n = self.n
        # project: logits from all streams of a token
        flat = x.flatten(-2)
        normed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        pre, post, res = F.linear(normed, self.phi).split([n, n, n * n], -1)
        # gates
        h_pre = torch.sigmoid(self.scale[0] * pre + self.bias[:n])
        h_post = 2 * torch.sigmoid(self.scale[1] * post + self.bias[n : 2 * n])
        logits = (self.scale[2] * res + self.bias[2 * n :]).unflatten(-1, (n, n))
        h_res = logits.softmax(-1) + 1e-6
        for axis in (-2, -1, -2):
            h_res = h_res / (h_res.sum(axis, keepdim=True) + 1e-6)
        # read
        u = (h_pre.unsqueeze(-1) * x).sum(-2)
        f = self.layer(u)
        # write
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.transpose(-1, -2) @ x


class Model(nn.Module):
    def __init__(self, C: int = 32) -> None:
        super().__init__()
        self.first = HyperConnection(nn.Linear(C, C), C)
        self.second = HyperConnection(nn.Linear(C, C), C)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).mean(-2)


class _Seen:
    """What each stage made of the model, in words."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def run(self) -> None:
        model, x = Model(), torch.randn(SHAPE)
        torch.compile(model, backend=self._backend)(x).sum().backward()

    def _backend(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        written = [node for node in gm.graph.nodes if node.op != "placeholder"]
        # The first sublayer ends with the sum whose result the second one flattens.
        end = next(i for i, node in enumerate(written) if node.name == "flat_1")
        self.texts["nodes"] = str(len(gm.graph.nodes))
        # All but the nodes that make gates: those between the logits and the read.
        names = [node.name for node in written]
        logits, read = names.index("res") + 1, names.index("unsqueeze")
        self.texts["project"] = "\n".join(map(_node_line, written[:logits]))
        self.texts["gates"] = str(read - logits)
        self.texts["read_and_write"] = "\n".join(map(_node_line, written[read:end]))
        record = shadow.trace(sizes.from_inputs(functional(gm.graph)))
        first = {node.name for node in written[:end]}
        ops = [op for op in record.ops if op.node.name in first]
        self.texts["recorded"] = str(len(record.ops))
        self.texts["record"] = "\n".join(map(_op_line, ops[:10]))
        record.release()
        report = passes.run_recursively(gm)
        report.seconds = 0.0
        self.texts["report"] = re.sub(r" \(\d\.\d\d s\)", "", str(report))
        self.texts["rewritten"] = graph_text(gm.graph)
        compilers = {name: self._compiler(name) for name in ("forward", "backward")}
        call: Callable[..., Any] = aot_autograd(
            fw_compiler=compilers["forward"], bw_compiler=compilers["backward"], partition_fn=self._partition
        )(gm, inputs)
        return call

    def _partition(self, joint: fx.GraphModule, inputs: Any, **known: Any) -> Any:
        self.texts["joint"] = graph_text(joint.graph)
        self.texts["fusions"] = _counted(passes.fuse(joint).fusions)
        self.texts["fused"] = graph_text(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **known)

    def _compiler(self, name: str) -> Callable[..., Any]:
        def compiled(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            self.texts[name] = graph_text(module.graph)
            _, shared = passes.share(module.graph)
            self.texts[f"{name} shared"] = _counted(shared.shared)
            self.texts[f"{name} lowered"] = _counted(passes.lower(module.graph).lowered)
            self.texts[f"{name}_loops"] = _loops(module.graph)
            forward: Callable[..., Any] = module.forward
            return forward

        return lambda module, inputs: make_boxed_compiler(compiled)(module, inputs)


def _node_line(node: fx.Node) -> str:
    """`square = square(flat)    # f32[2, 8, 128]`."""
    target = node.target if isinstance(node.target, str) else node.target.__name__
    value = node.meta.get("example_value")
    kind = f"# {_kind(value)}" if isinstance(value, Tensor) else ""
    arguments = ", ".join([*map(_argument, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())])
    return f"{f'{node.name} = {target}({arguments})':<58}{kind}".rstrip()


def _argument(value: Any) -> str:
    name = str(value)
    parameter = re.fullmatch(r"l_self_modules_(\w+?)_(?:modules_(\w+?)_)?parameters_(\w+)_", name)
    if parameter is not None:
        return ".".join(part for part in parameter.groups() if part)
    return "x" if name == "l_x_" else name.replace(", None)", ")") if isinstance(value, slice) else name


def _op_line(op: shadow.Op) -> str:
    """`pow(f32[2, 8, 128]) -> f32[2, 8, 128]    # square`."""
    read = ", ".join(_kind(value.meta) for value in op.sources)
    made = ", ".join(_kind(value.meta) for value in op.outs)
    return f"{f'{op.name}({read}) -> {made}':<58}# {op.node.name}"


def _kind(value: Tensor) -> str:
    return f"f32{list(value.shape)}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items() if count)


def _loops(graph: fx.Graph) -> str:
    """The calls of C++ loops in a graph, by what the loops compute."""
    found = graph.find_nodes(op="call_function", target=torch.ops.mhc._loop.default)
    return _counted(Counter(re.findall(r"\w+", str(node.args[0]))[0] for node in found))


def _source() -> str:
    return "\n\n".join(textwrap.dedent(inspect.getsource(each)) for each in (HyperConnection, Model)).rstrip()


_PAGE = """\
# How it works

Generated by `python -m tests.walkthrough`, which compiles the model below. A test compares the two.

The compilation of a model has these stages:

| stage | works on | what it does |
|---|---|---|
| Dynamo | Python code | traces the program into a graph |
| record | Dynamo's graph | notes which ATen operators each node runs |
| recognise, plan | the record | finds the steps of hyper-connections, and decides which operator each becomes |
| rewrite | Dynamo's graph | puts the operators into the graph |
| autograd (AOTAutograd) | Dynamo's graph | adds the backward pass: the joint graph |
| fuse | the joint graph | joins operators of neighbouring sublayers |
| partition (AOTAutograd) | the joint graph | cuts it into a forward and a backward graph |
| share | the forward graph and the backward graph | compiles identical sublayers once |
| lower | the forward graph and the backward graph | replaces operators by kernels, loops and ATen operators |
| Inductor | the forward graph and the backward graph | plans memory and generates code |

The **joint graph** has the forward and the backward pass in one graph. ATen is PyTorch's own library of operators.

Dynamo, AOTAutograd and Inductor belong to PyTorch. The other stages run in Inductor's own hooks for custom passes:
`pre_grad_custom_pass` (record to rewrite), `joint_custom_pre_pass` (fuse) and `post_grad_custom_post_pass` (share,
lower).

Inductor caches the compiled graphs. The key of the cache covers the sources of mhc_compile and all its options but
`mhc.check`. The rewriting comes before the look-up, so it is done again for a graph from the cache.

## The program

This model is plain PyTorch. It has two sublayers, each a linear layer with its hyper-connection. Its input x has the
shape [2, 8, 4, 32]: 16 tokens, n = 4 streams, C = 32 channels.

```python
{source}
```

The code of a hyper-connection has four steps:

- **project**: all streams of a token, multiplied by phi, become n² + 2n logits.
- **gates**: the logits become h_pre, h_post and h_res. The loop that makes h_res is a Sinkhorn. Each turn is a
  **half-step**, which normalises either the rows or the columns.
- **read**: h_pre weighs the streams. Their sum u is the input of the sublayer.
- **write**: h_res mixes the streams, and h_post adds the output f of the sublayer.

Project, read and write touch all streams. They are the **wide** steps, and take most of the time. Gates are a few
numbers a token.

## Dynamo's graph

Dynamo traces the model into {nodes} nodes: two sublayers, views included. Their Sinkhorn has 3 half-steps, and
DeepSeek-V4's 39. The first sublayer is this part of the graph, without the {gates} nodes that make the gates:

```text
{project}
  ...
{read_and_write}
```

The last line is the new x. The second sublayer repeats these lines with its own parameters.

## Record

Programs spell one computation in many ways: `x.square()` and `x.pow(2)` are one operator of ATen. So each node runs
once on fake tensors, which have shapes but no data. PyTorch splits a composite operator, such as `linear`, into simpler
ones before it computes them. The record holds these simpler ATen operators. It has {recorded} entries. These are the
first ten, each with the node that it comes from:

```text
{record}
  ...
```

mhc_compile reads the record and never changes it. Recording leaves Dynamo's graph as it is, with its checkpoint regions
and custom autograd functions.

## Recognise and plan

Recognition starts at the three wide steps. Each is found by its structure, whatever code makes its gates:

- a **read** is a sum of the streams. Each stream is multiplied by one number for each token, its gate;
- a **write** is a mix of the streams, plus the sublayer's output times a gate for each stream;
- a **projection** is a linear map of all streams of a token.

Then the gates are read. Known gates, such as sigmoid and Sinkhorn, become part of an operator. Unknown gates stay the
program's code. The plan joins the steps into **sites**. One site becomes one operator. A step that cannot be
rewritten is declined, with a reason. The report lists the sites:

```text
{report}
```

## Rewrite

The operators take the place of the nodes that they compute. This text shows only the operators. `%0.1` is the second
result of operator 0. `f=f32[2, 8, 32](%0.0)` is a tensor that other code computes from `%0.0`: the output of the
sublayer. The results of `generate_mix_and_aggregate` are the sublayer's input, h_post and h_res.

```text
{rewritten}
```

`return` names the results from which the graph's outputs are computed. Here the model returns the mean of `%3` over its
streams. Outputs that are computed from no operator's result are not named. If all are such, the line is `return` alone.

`mhc_compile.testing.capture` returns this text for your own model. If Dynamo makes several graphs, their texts follow
one another, and each counts from `%0`. The line between two of them says where the graph breaks, with the function and
the code of the line:

```text
cut: Dynamo breaks the graph in forward, at torch._dynamo.graph_break()
```

## Autograd

AOTAutograd traces forward and backward into one graph. Each operator has a backward operator of its own. Its arguments:

- `d_` stands for a gradient: `d_x_new` is the gradient of the new streams, which `expand_combine` has made.
- `h` and `ms` are further results of `generate_mix_and_aggregate`, which are kept for the backward pass. `h` is the
  product of phi and the streams. `ms` is the mean of the squares of a token's streams.
- `needs` says which arguments need a gradient, in the order of the forward operator. x needs none here, so the last
  backward operator does not compute it (`needs=[False, ...]`).

```text
{joint}
```

## Fuse

Between two sublayers, `expand_combine` writes the new x, and `generate_mix_and_aggregate` reads it. One
`boundary` does both. Their backward operators become one `boundary_backward`.

Before that, `accumulate` removes an addition. Two operators read the x between the sublayers, so its gradient is a sum.
Autograd adds the two parts: `d_x_new=f32[2, 8, 4, 32](%4.3, %5.0)` above. With `accumulate`, the second operator adds
the first part itself. That operator is then part of the `boundary_backward`, which takes the first part as
`d_x_new=%3.3`.

The report counts the fusions: {fusions}.

```text
{fused}
```

[Fusion and recompute](fusion.md) lists the fusions and their options.

## Partition

AOTAutograd's partitioner chooses what the forward pass keeps for the backward pass, and cuts the graph in two. This is
the forward graph. It returns the result, which is computed from `%2`, and the tensors that it keeps.

```text
{forward}
```

This is the backward graph. The tensors that were kept are inputs of it, so they have no number here.

```text
{backward}
```

## Share

Identical sublayers become calls of one graph, so Inductor compiles them once. {shared}
[Performance](performance.md#compile-time) has measurements of larger models.

## Lower

Inductor does not know the operators of mhc_compile. It would call each of them from Python, which costs time. So
operators are split into parts that Inductor knows:

- **On a GPU**, an operator becomes launches of its Triton kernels. Inductor plans their memory, and CUDA graphs hold
  them.
- **On a CPU**, an operator becomes ATen operators, which Inductor fuses with their neighbours, and loops in C++.

For this model on a CPU, the forward graph calls these loops: {forward_loops}. The backward graph calls
{backward_loops}. All else in both graphs is ATen operators.

- `mix` projects the streams and makes the gates, and `mix_backward` computes the gradients of gates and logits.
- `unproject` projects the gradient of the logits back to the streams, and adds those of reading and writing.
- `products` multiplies two tensors and adds up the products over the C channels, for the gradients of gates.
- `phi_gradient` computes the gradient of phi.

From here on, Inductor compiles the graphs as usual.

## What holds throughout

- A rewrite may decline, but it must not be wrong. [Accuracy](accuracy.md) has the rule and the figures.
- A failure in a stage leaves the graph as it was before that stage. [Reliability](reliability.md) has the details.
"""


def _share_words(texts: dict[str, str]) -> str:
    shared = texts["forward shared"] or texts["backward shared"]
    if shared:
        return f"Here these are shared: {shared}."
    return "Nothing is shared here: a sublayer of one linear layer is too small."


def _check(texts: dict[str, str]) -> None:
    """What the page's own sentences say of the graphs."""
    named = set(re.findall(r"= (\w+)\(", texts["rewritten"]))
    assert named == {"generate_mix_and_aggregate", "expand_combine"}
    assert "= boundary(" in texts["fused"]
    assert "= boundary_backward(" in texts["fused"]
    assert texts["forward"].splitlines()[-1].startswith("return %2,")
    assert "d_x_new=f32[2, 8, 4, 32](%4.3, %5.0)" in texts["joint"]
    assert "= boundary_backward(d_x_new=%3.3," in texts["fused"]
    loops = f"{texts['forward_loops']}, {texts['backward_loops']}"
    assert set(re.findall(r"\w+(?=,|$)", loops)) == {"mix", "mix_backward", "unproject", "products", "phi_gradient"}


def generate() -> str:
    """The text of docs/how_it_works.md."""
    torch._dynamo.reset()
    seen = _Seen()
    seen.run()
    _check(seen.texts)
    values = {key: text for key, text in seen.texts.items() if " " not in key}
    return _PAGE.format(
        source=_source(),
        shared=_share_words(seen.texts),
        **values,
    )


def main(arguments: Sequence[str]) -> None:
    """Write the page."""
    Path(arguments[0] if arguments else PATH).write_text(generate(), encoding="utf-8")


if __name__ == "__main__":
    # The model's module has the same name in a test and here.
    from tests import walkthrough

    walkthrough.main(sys.argv[1:])
