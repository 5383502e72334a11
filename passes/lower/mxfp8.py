"""Quantization of a sublayer's input in MXFP8, which its kernel can do before it stores anything.

After autograd, code that quantizes is some thirty operations, which differ between libraries and their versions. So it
is not compared with a pattern. What it computes of each block of 32 numbers is evaluated, and compared to the bit with
the two ways that the kernel knows. Operations that could mix blocks are not looked through.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mhc_compile import compat
from mhc_compile.passes.fuse.joint import contiguous, is_view
from mhc_compile.passes.memory import Memory

aten, prims = torch.ops.aten, torch.ops.prims

_BLOCK = 32
# The ways that `kernels/mxfp8.py` describes.
SCALINGS = ("floor", "rceil")
_NUMBERS = torch.float8_e4m3fn
_LARGEST = 448.0
# What keeps the order of elements, and has no part in the numbers.
_KEEPS = (aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
# How torchao has a B200 make the exponent of a scale. The other half of the result is of 0.
_ROUNDED_UP = "cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;"
# Operations after a sublayer's input that are looked at, at most.
_MOST = 100

# For each operation of a region, whether it has an element for each number, or one for each block.
Region = dict[fx.Node, bool]


@dataclass(frozen=True)
class Quantization:
    """Where a graph has the numbers of MXFP8 and the exponents of their scales, and how the scales are made.

    There are several of each if several products quantize the same input.
    """

    layer_input: fx.Node
    region: Region
    results: tuple[fx.Node, ...]
    scaling: str

    def replace(self, numbers: fx.Node, exponents: fx.Node, memory: Memory) -> None:
        """Let the readers of the quantization have these [..., C] and bytes [..., C / 32], and take it out."""
        graph = self.layer_input.graph
        for old in self.results:
            new, dtype = numbers if self.region[old] else exponents, old.meta["val"].dtype
            with graph.inserting_before(old):
                view = _call(graph, aten.view.default, new, _sizes(old))
                if view.meta["val"].dtype != dtype:
                    view = _call(graph, aten.view.dtype, view, dtype)
            memory.join(new, view)
            old.replace_all_uses_with(view)
        for size in _sizes_read(self.layer_input):
            size.replace_input_with(self.layer_input, numbers)
        inside = (self.layer_input, *self.region)
        constants = {source for node in inside for source in node.all_input_nodes if _is_constant(source)}
        for node in (*reversed(inside), *constants):
            if not node.users:
                graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, source: fx.Node, *args: Any) -> fx.Node:
    node = graph.call_function(target, (source, *args))
    node.meta["val"] = target(source.meta["val"], *args)
    return node


def quantization(layer_input: fx.Node, memory: Memory) -> Quantization | None:
    """The quantization of an operator's result [..., C], if nothing else reads it."""
    value = compat.example(layer_input)
    width = value.shape[-1]
    if value.dtype != torch.bfloat16 or not contiguous(layer_input) or not isinstance(width, int) or width % _BLOCK:
        return None
    region = _region(layer_input)
    if not any(compat.example(node).dtype == _NUMBERS for node in region):
        return None
    nodes = [layer_input, *region]
    for scaling, places in _known(layer_input, region):
        results = tuple(nodes[place] for place in places)
        fit = all(_sizes(node) is not None and contiguous(node) for node in results)
        if fit and not _would_share(results, region, memory):
            return Quantization(layer_input, region, results, scaling)
    return None


def _would_share(results: tuple[fx.Node, ...], region: Region, memory: Memory) -> bool:
    """Whether two results, which would be one tensor, both leave the graph, or whether one of them is written to."""
    for kind in (True, False):
        readers = [memory.readers(node) for node in results if region[node] == kind]
        written = any(compat.may_mutate(reader) for each in readers for reader in each)
        leaving = sum(any(reader.op == "output" for reader in each) for each in readers)
        if len(readers) > 1 and (written or leaving > 1):
            return True
    return False


def _sizes_read(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is aten.sym_size.int]


def _sizes(node: fx.Node) -> list[int] | None:
    """The sizes of a node's result for a view, with -1 for the one that is symbolic; None if there are several."""
    sizes = [size if isinstance(size, int) else -1 for size in compat.example(node).shape]
    return sizes if sizes.count(-1) <= 1 else None


def _region(layer_input: fx.Node) -> Region:
    """What is computed of the input alone, block by block, in the order of the graph."""
    region: Region = {layer_input: True}
    node = layer_input
    for _ in range(_MOST):
        node = node.next
        if node.op == "output":
            break
        if any(source in region for source in node.all_input_nodes):
            each = _kind(node, region)
            if each is not None:
                region[node] = each
    del region[layer_input]
    return region


def _kind(node: fx.Node, region: Region) -> bool | None:
    """True for an element of each number, False for one of each block, None for what is not computed block by block."""
    value, sources = compat.example(node), node.all_input_nodes
    if not isinstance(value, Tensor) or value.device != compat.example(next(iter(region))).device:
        return None
    if _keeps_order(node):
        # The others are sizes.
        sources = sources[:1]
    if not all(source in region or _is_constant(source) for source in sources):
        return None
    taken = [source for source in sources if source in region]
    kinds = [region[source] for source in taken]
    shapes = [compat.example(source).shape for source in taken]
    if _keeps_order(node):
        # Views that permute leave no contiguous memory.
        return kinds[0] if contiguous(taken[0]) and contiguous(node) else None
    if node.target is aten.amax.default:
        last = len(node.args) > 1 and node.args[1] in ([-1], [len(shapes[0]) - 1])
        return False if kinds[0] and last and _is_block(shapes[0]) and contiguous(taken[0]) else None
    if not _is_pointwise(node):
        return None
    each = any(kinds)
    for kind, shape in zip(kinds, shapes, strict=True):
        of_blocks = each and not kind
        if len(shape) != value.dim() or (of_blocks and not (_is_block(value.shape) and shape[-1] == 1)):
            return None
        pairs = zip(shape[:-1] if of_blocks else shape, value.shape, strict=False)
        if not all(compat.same_size(one, other) for one, other in pairs):
            return None
    return each


def _keeps_order(node: fx.Node) -> bool:
    return is_view(node) or node.target in _KEEPS


def _is_block(shape: torch.Size) -> bool:
    return len(shape) > 0 and compat.same_size(shape[-1], _BLOCK)


def _is_constant(node: fx.Node) -> bool:
    made = node.target in (aten.scalar_tensor.default, aten.full.default) and compat.example(node).dim() == 0
    return made and len(node.args) > 0 and isinstance(node.args[-1], (int, float))


def _is_pointwise(node: fx.Node) -> bool:
    if node.target in _CASTS:
        return True
    if node.target is aten.view.dtype:
        source: Tensor = compat.example(node.all_input_nodes[0])
        return source.element_size() == int(compat.example(node).element_size())
    if _is_rounded_up(node):
        return True
    return compat.is_pure(node) and torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _is_rounded_up(node: fx.Node) -> bool:
    return str(node.target) == "inline_asm_elementwise" and node.kwargs.get("asm_str") == _ROUNDED_UP


# What regions are, by what they do: the ways of scaling, each with the places of its results.
_KNOWN: dict[str, list[tuple[str, list[int]]]] = {}


def _known(layer_input: fx.Node, region: Region) -> list[tuple[str, list[int]]]:
    """The ways of scaling that a region may have, with the places of results in it; layers have equal ones."""
    places = {node: place for place, node in enumerate((layer_input, *region))}
    sizes = _sizes_read(layer_input)
    readers = [[places.get(user, -1) for user in node.users if user not in sizes] for node in places]
    steps = [_step(node, places, region) for node in region]
    key = str((steps, readers))
    if key not in _KNOWN:
        with compat.without_modes():
            # Devices differ in the integer that they cast NaN and large numbers to. So nothing may depend on it.
            runs = [_Values({layer_input: _blocks()}, undefined) for undefined in (0, 77)]
            found = [(scaling, _results(layer_input, region, scaling, runs)) for scaling in SCALINGS]
        _KNOWN[key] = [(scaling, [places[node] for node in nodes]) for scaling, nodes in found if nodes is not None]
    return _KNOWN[key]


def _step(node: fx.Node, places: dict[fx.Node, int], region: Region) -> tuple[Any, ...]:
    """What a node computes of which others; for views, whose sizes are those of a program, only of which."""

    def named(source: fx.Node) -> Any:
        return f"%{places[source]}" if source in places else str((source.target, source.args, compat.example(source)))

    args, kwargs = (node.args[:1], {}) if is_view(node) else (node.args, node.kwargs)
    return (str(node.target), fx.node.map_arg((args, kwargs), named), compat.example(node).dtype, region[node])


def _results(layer_input: fx.Node, region: Region, scaling: str, runs: list[_Values]) -> list[fx.Node] | None:
    """The first operations with the numbers and the exponents of MXFP8, if all that the input goes into is theirs."""
    wanted = _mxfp8(_blocks(), scaling)
    found, inside = [], {layer_input}
    try:
        for node in region:
            # What reads results alone has the same numbers as before.
            if any(source in inside for source in node.all_input_nodes):
                if all(_same_bits(run.of(node), wanted[0 if region[node] else 1]) for run in runs):
                    found.append(node)
                else:
                    inside.add(node)
    except (RuntimeError, NotImplementedError):  # torch has not every operation for every dtype on a CPU
        return None
    readers = {user for node in inside for user in node.users} - set(_sizes_read(layer_input))
    return found if all(user in region for user in readers) else None


class _Values:
    """What nodes compute of blocks [blocks, 32]: [blocks, 1], if they have one element for each.

    undefined is what becomes of numbers that no integer is, where they are cast to one.
    """

    def __init__(self, known: dict[fx.Node, Tensor], undefined: int) -> None:
        self._known, self._undefined = known, undefined

    def of(self, node: fx.Node) -> Tensor:
        """Raises RuntimeError if the node's dtype is another here, as that of a sum with a tensor without dims is."""
        if node not in self._known:
            value = self._evaluated(node)
            if value.dtype != compat.example(node).dtype:
                raise RuntimeError(f"{node} has {value.dtype}")
            self._known[node] = value
        return self._known[node]

    def _evaluated(self, node: fx.Node) -> Tensor:
        dtype = compat.example(node).dtype
        if _is_constant(node):
            number: Any = node.args[-1]
            return torch.tensor(number, dtype=dtype, device="cpu")
        if _keeps_order(node):
            return self.of(node.all_input_nodes[0])
        given = {source: self.of(source) for source in node.all_input_nodes}
        first = next(iter(given.values()))
        if node.target is aten.amax.default:
            return first.amax(-1, keepdim=True)
        if node.target in _CASTS:
            return self._cast(first, dtype)
        if _is_rounded_up(node):
            return _power_above(first).to(dtype)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: given[source])
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result

    def _cast(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == _NUMBERS:
            return _to_numbers(value)
        if value.is_floating_point() and not (dtype.is_floating_point or dtype == torch.bool):
            limits = torch.iinfo(dtype)
            # Rounded towards zero. As a float, the largest integer may be one more.
            defined = (value > limits.min - 1) & (value < limits.max)
            return torch.where(defined, value.where(defined, 0).to(dtype), self._undefined)
        return value.to(dtype)


def _to_numbers(value: Tensor) -> Tensor:
    """As a GPU casts: the largest number in place of a larger one, which torch 2.11 makes NaN on a CPU."""
    return value.float().clamp(-_LARGEST, _LARGEST).to(_NUMBERS)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of bytes are equal, or of numbers with NaN in the same places."""
    if left.dtype.itemsize != 1 or (left.dtype == _NUMBERS) != (right.dtype == _NUMBERS):
        return False
    one, other = left.view(torch.uint8), right.view(torch.uint8)
    if left.dtype != _NUMBERS:
        return torch.equal(one, other)
    both_nan = (one & 0x7F == 0x7F) & (other & 0x7F == 0x7F)
    return bool(((one == other) | both_nan).all())


@functools.cache
def _blocks() -> Tensor:
    """Blocks [blocks, 32] of bfloat16, with each size that there is as the largest.

    Their other numbers are random: of most sizes down to 2^-14 of it, of some down to 2^-250, and zeros of both signs.
    The largest may occur several times, or everywhere. Others have NaN and infinities, one or many, with any numbers.
    """
    random = torch.Generator(device="cpu").manual_seed(0)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=random, device="cpu")

    sizes = torch.arange(0x7F80, device="cpu", dtype=torch.int16).view(torch.bfloat16).float()[:, None]
    # Once of each exponent and some mantissas, equal everywhere.
    constant = sizes[torch.arange(0x7F80, device="cpu") % 16 == 0]
    # What is no number, among numbers of any size.
    special = torch.tensor([0x7F80, -0x80, 0x7FC0, -0x40, 0x7FFF, -1, 0x7F81, -0x7F], dtype=torch.int16, device="cpu")
    any_size = sizes[numbers(0x7F80, 2048)]
    largest = torch.cat([sizes, any_size, constant])
    shape = (len(largest), _BLOCK)
    depths = torch.where(numbers(8, *shape) == 0, numbers(250, *shape), numbers(15, *shape))
    parts = (numbers(1 << 16, *shape) / (1 << 16)) * torch.exp2(-depths.float())
    parts = torch.where(numbers(16, *shape) == 0, 0.0, parts)
    parts = torch.where(numbers(64, *shape) == 0, 1.0, parts)
    parts[torch.arange(len(parts), device="cpu"), numbers(_BLOCK, len(parts))] = 1.0
    parts[-len(constant) :] = 1.0
    signs = 1.0 - 2.0 * numbers(2, *shape)
    signs[-len(constant) // 2 :] = 1.0
    blocks = (parts * largest * signs).to(torch.bfloat16)
    rows = blocks[len(sizes) : len(sizes) + len(any_size)]
    many = numbers(2, len(rows), 1) * 31
    at = (numbers(_BLOCK, *rows.shape) <= many) & (numbers(2, *rows.shape) == 0)
    at[torch.arange(len(rows), device="cpu"), numbers(_BLOCK, len(rows))] = True
    kinds = special.view(torch.bfloat16)[numbers(len(special), *rows.shape)]
    # Of one kind in the first half.
    kinds[: len(kinds) // 2] = kinds[: len(kinds) // 2, :1]
    rows.copy_(torch.where(at, kinds, rows))
    return blocks


def _power_above(value: Tensor) -> Tensor:
    """The biased exponent of the least power of two that is not below a size, as a GPU rounds it up."""
    bits = value.float().view(torch.int32)
    exponents = (bits >> 23) + (bits & 0x7FFFFF != 0)
    # Up to 2^-127, and beyond it, among numbers without a leading one.
    exponents = torch.where(bits < 1 << 23, (bits > 1 << 22).int(), exponents)
    return torch.where(value.isnan(), 255, exponents.clamp(max=254))


def _mxfp8(blocks: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """Numbers of blocks [blocks, 32], and the exponents [blocks, 1] of their scales: what the kernel computes."""
    largest = blocks.float().abs().amax(-1, keepdim=True)
    if scaling == "rceil":
        exponents = _power_above(largest / _LARGEST)
        factors = torch.exp2(127.0 - exponents)
        factors = torch.where(exponents == 0, 1.0, torch.where(exponents == 255, float("nan"), factors))
    else:
        exponents = torch.where(largest.isnan(), 255, (largest.view(torch.int32) >> 23) - 8).clamp(min=0)
        factors = torch.exp2(127.0 - exponents.clamp(min=1))
        factors = torch.where(exponents == 255, 0.0, factors)
    return _to_numbers(blocks.float() * factors), exponents.to(torch.uint8)
