"""A quantization in MXFP8 becomes a part of the kernel that makes a sublayer's input, and nothing else does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mhc_compile import passes
from tests.passes.lowering import any_number, arguments, graph_of, launches

mhc = torch.ops.mhc
mxfp8 = importlib.import_module("mhc_compile.passes.lower.mxfp8")

NUMBERS, EXPONENTS = torch.float8_e4m3fn, torch.float8_e8m0fnu
Quantize = Callable[[Tensor], Any]


def blocks_of(v: Tensor, size: int = 32) -> tuple[Tensor, Tensor]:
    blocks = v.unflatten(-1, (-1, size))
    return blocks.float(), blocks.abs().amax(-1, keepdim=True).float()


def floor(v: Tensor, size: int = 32, lower: int = 8, dtype: torch.dtype = NUMBERS) -> Any:
    """By the bits of the largest size."""
    blocks, largest = blocks_of(v, size)
    exponents = torch.where(largest.isnan(), 255, ((largest.view(torch.int32) >> 23) - lower).clamp(0, 255))
    scale = (exponents.int() << 23).view(torch.float32).clamp(min=2.0**-126)
    numbers = (blocks / scale).clamp(-448, 448).to(dtype)
    return numbers.flatten(-2), exponents.to(torch.uint8).squeeze(-1)


def rceil(v: Tensor, largest_number: float = 448.0, of_nan: int = 255) -> Any:
    """By logarithms."""
    blocks, largest = blocks_of(v)
    ratio = largest / largest_number
    exponents = (ratio.log2().ceil().clamp(-127, 127) + 127).to(torch.uint8)
    exponents = torch.where(ratio.isnan(), of_nan, exponents)
    factor = torch.exp2(127 - exponents.float())
    factor = torch.where(exponents == 0, 1.0, torch.where(exponents == 255, torch.nan, factor))
    return (blocks * factor).to(NUMBERS).flatten(-2), exponents.view(EXPONENTS).squeeze(-1)


def twice(v: Tensor) -> Any:
    """As two products of one input do it: each for itself."""
    (one, of_one), (other, of_other) = floor(v), floor(v)
    return one, of_one, other.float() * of_other.float().repeat_interleave(32, -1)


def by_torchao(mode: str) -> Quantize:
    def quantize(v: Tensor) -> Any:
        module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        exponents, numbers = module.to_mx(v, NUMBERS, 32, module.ScaleCalculationMode[mode])
        return numbers, exponents

    return quantize


def transposed(v: Tensor) -> Any:
    """Blocks of tokens, as for the gradient of a weight."""
    return floor(v.permute(1, 0).clone(memory_format=torch.contiguous_format))


def also_read(v: Tensor) -> Any:
    return *floor(v), v.relu()


def size_also_read(v: Tensor) -> Any:
    return *floor(v), blocks_of(v)[1]


def both_ways(v: Tensor) -> Any:
    return *floor(v), *rceil(v)


def numbers_only(v: Tensor) -> Any:
    return floor(v)[0]


def both_leave(v: Tensor) -> Any:
    """What the caller does to one tensor must not change the other."""
    return *floor(v), floor(v)[0]


def quantized(blocks: Tensor, exponents: Tensor) -> Any:
    scale = (exponents.int() << 23).view(torch.float32).clamp(min=2.0**-126)
    return (blocks / scale).clamp(-448, 448).to(NUMBERS).flatten(-2), exponents.to(torch.uint8).squeeze(-1)


def floored(largest: Tensor) -> Tensor:
    return torch.where(largest.isnan(), 255, ((largest.view(torch.int32) >> 23) - 8).clamp(0, 255))


def with_zeros(v: Tensor) -> Any:
    """A block with a zero has another scale."""
    blocks, largest = blocks_of(v)
    zero = (blocks == 0).float().amax(-1, keepdim=True)
    return quantized(blocks, torch.where((zero > 0) & (largest > 1e-30), floored(largest) + 1, floored(largest)))


def infinity_beside_nan(v: Tensor) -> Any:
    blocks, largest = blocks_of(v)
    infinite = blocks.isinf().float().amax(-1, keepdim=True)
    return quantized(blocks, torch.where((infinite > 0) & largest.isnan(), 254, floored(largest)))


def all_equal(v: Tensor) -> Any:
    blocks, largest = blocks_of(v)
    least = -((-blocks.abs()).amax(-1, keepdim=True))
    return quantized(blocks, torch.where((least == largest) & (largest > 1e-30), 1, 0) + floored(largest))


def zeros_replaced(v: Tensor) -> Any:
    blocks, largest = blocks_of(v)
    return quantized(torch.where((blocks == 0) & (largest > 1e-30), largest, blocks), floored(largest))


def tiny_numbers_flushed(v: Tensor) -> Any:
    blocks, largest = blocks_of(v)
    tiny = largest.isfinite() & (largest > 1e-25) & (blocks.abs() < largest * 1e-10)
    return quantized(torch.where(tiny, 0.0, blocks), floored(largest))


def another_mantissa(v: Tensor) -> Any:
    """Some mantissas, of most exponents, are rounded up."""
    blocks, largest = blocks_of(v)
    bits = largest.view(torch.int32)
    mantissa, exponent = (bits >> 16) & 0x7F, bits >> 23
    odd = (mantissa >= 0x20) & (mantissa < 0x30) & (exponent != 127) & (exponent > 20) & (exponent < 255)
    return quantized(blocks, torch.where(odd, floored(largest) + 1, floored(largest)))


def nan_as_an_integer(v: Tensor) -> Any:
    """Which number that is depends on the device."""
    blocks, largest = blocks_of(v)
    exponents = largest.log2().floor().to(torch.int32) - 8
    exponents = torch.where(largest.isinf(), 120, exponents).clamp(min=-127)
    numbers = (blocks * torch.exp2(-exponents.clamp(min=-126).float())).clamp(-448, 448).to(NUMBERS)
    stored = torch.where(largest.isnan(), 255, torch.where(largest == 0, 0, exponents + 127))
    return numbers.flatten(-2), stored.to(torch.uint8).squeeze(-1)


def by_neighbour(v: Tensor) -> Any:
    """Each block with the scale of the token before."""
    blocks, largest = blocks_of(v)
    exponents = torch.where(largest.isnan(), 255, ((largest.view(torch.int32) >> 23) - 8).clamp(0, 255)).roll(1, 0)
    scale = (exponents.int() << 23).view(torch.float32).clamp(min=2.0**-126)
    return (blocks / scale).clamp(-448, 448).to(NUMBERS).flatten(-2), exponents.to(torch.uint8)


TAKEN: dict[str, tuple[Quantize, str]] = {
    "floor": (floor, "floor"),
    "rceil": (rceil, "rceil"),
    "twice": (twice, "floor"),
    "numbers only": (numbers_only, "floor"),
    "torchao, floor": (by_torchao("FLOOR"), "floor"),
    "torchao, rceil": (by_torchao("RCEIL"), "rceil"),
}
LEFT: dict[str, Quantize] = {
    "blocks of 64": lambda v: floor(v, 64),
    "blocks of 16": lambda v: floor(v, 16),
    "half the scale": lambda v: floor(v, lower=9),
    "another largest number": lambda v: rceil(v, 464.0),
    "NaN with the largest scale": lambda v: rceil(v, of_nan=254),
    "blocks of tokens": transposed,
    "input read elsewhere": also_read,
    "largest sizes read elsewhere": size_also_read,
    "in two ways": both_ways,
    "two results that leave": both_leave,
    "zeros": with_zeros,
    "infinity beside NaN": infinity_beside_nan,
    "blocks of one number": all_equal,
    "zeros replaced": zeros_replaced,
    "tiny numbers flushed": tiny_numbers_flushed,
    "another mantissa": another_mantissa,
    "NaN as an integer": nan_as_an_integer,
    "on another device": lambda v: floor(v.cpu()),
    "the scales of other tokens": by_neighbour,
    "rounded before": lambda v: floor(v.to(torch.float8_e5m2).to(v.dtype)),
    "negated": lambda v: floor(-v),
    "of a sum with itself": lambda v: floor(v + v),
    "rounded up, torchao": by_torchao("CEIL"),
    "e5m2": lambda v: floor(v, dtype=torch.float8_e5m2),
}


def boundary(quantize: Quantize, values: dict[str, Tensor], **forms: Any) -> fx.Graph:
    forms = {"input_norm_eps": 1e-6} | forms

    def program(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, post: Tensor, res: Tensor) -> Any:
        new, u, next_post, next_res, *_ = mhc.boundary(f, None, post, x, res, phi, scale, bias, **forms)
        return new, next_post, next_res, quantize(u)

    return graph_of(program, values)


def of_bfloat16(fakes: FakeTensorMode, **sizes: int) -> dict[str, Tensor]:
    values = arguments(fakes, **sizes)
    with fakes:
        return values | {name: values[name].bfloat16() for name in "xf"}


def evaluated(graph: fx.Graph, numbers: Tensor) -> list[Tensor]:
    """What a graph makes of these numbers in place of the operator's layer input."""
    (operator,) = [node for node in graph.nodes if str(node.target).startswith("mhc.")]
    (layer_input,) = [user for user in operator.users if user.args[1] == 1]
    values: dict[fx.Node, Any] = {layer_input: numbers}
    for node in graph.nodes:
        if node.all_input_nodes and all(source in values for source in node.all_input_nodes):
            values[node] = node.target(*fx.node.map_arg(node.args, values.__getitem__), **node.kwargs)
        elif str(node.target) in ("aten.scalar_tensor.default", "aten.full.default"):
            values[node] = torch.tensor(node.args[-1], dtype=node.meta["val"].dtype)
    (output,) = graph.find_nodes(op="output")
    return [values[node] for node in output.args[0] if node in values]


@pytest.mark.parametrize("name", TAKEN)
def test_what_the_kernel_computes_is_taken(name: str, fakes: FakeTensorMode) -> None:
    quantize, scaling = TAKEN[name]
    graph = boundary(quantize, of_bfloat16(fakes))
    before = [result.meta["val"] for result in graph.find_nodes(op="output")[0].args[0]]
    report = passes.lower(graph, mxfp8=True)
    graph.lint()
    assert (report.lowered, report.errors) == ({"boundary": 1, "in MXFP8": 1}, [])
    (mix,) = [node.kwargs["kwargs"] for node in launches(graph)]
    assert mix["SCALING"] == scaling
    after = [result.meta["val"] for result in graph.find_nodes(op="output")[0].args[0]]
    for old, new in zip(before, after, strict=True):
        assert (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)
    left = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    taken_out = ("aten.abs", "aten.amax", "aten.where", "aten.clamp", "aten.scalar_tensor")
    assert not [each for each in left if each.startswith(taken_out)]


@pytest.mark.parametrize("name", LEFT)
def test_what_it_does_not_compute_is_left(name: str, fakes: FakeTensorMode) -> None:
    graph = boundary(LEFT[name], of_bfloat16(fakes, tokens=96))
    report = passes.lower(graph, mxfp8=True)
    graph.lint()
    assert (report.lowered, report.errors) == ({"boundary": 1}, [])


@pytest.mark.parametrize(
    ("forms", "dtype"), [({"input_norm_eps": None}, torch.bfloat16), ({"out_dtype": torch.float32}, torch.bfloat16)]
)
def test_a_kernel_without_whole_rows_of_bfloat16_quantizes_nothing(
    forms: dict[str, Any], dtype: torch.dtype, fakes: FakeTensorMode
) -> None:
    graph = boundary(floor, of_bfloat16(fakes), **forms)
    assert passes.lower(graph, mxfp8=True).lowered == {"boundary": 1}


def test_a_gpu_that_casts_to_no_float8(fakes: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = importlib.import_module("mhc_compile.kernels.gpus")
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[80])
    assert passes.lower(boundary(floor, of_bfloat16(fakes)), mxfp8=True).lowered == {"boundary": 1}


def test_the_first_read_of_a_graph(fakes: FakeTensorMode) -> None:
    def program(x: Tensor, f: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, post: Tensor, res: Tensor) -> Any:
        u, next_post, *_ = mhc.generate_mix_and_aggregate(x, phi, scale, bias, input_norm_eps=1e-6)
        return next_post, rceil(u)

    graph = graph_of(program, of_bfloat16(fakes))
    assert passes.lower(graph, mxfp8=True).lowered == {"generate_mix_and_aggregate": 1, "in MXFP8": 1}


def test_any_number_of_tokens(fakes: FakeTensorMode) -> None:
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    fakes.shape_env = shape_env
    fakes.static_shapes = False
    values = of_bfloat16(fakes, tokens=any_number(shape_env))
    graph = boundary(floor, values)
    report = passes.lower(graph, mxfp8=True)
    graph.lint()
    assert (report.lowered, report.errors) == ({"boundary": 1, "in MXFP8": 1}, [])


def test_a_size_of_the_layer_input_is_that_of_the_numbers(fakes: FakeTensorMode) -> None:
    """The layer input is not made for its size alone."""
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    fakes.shape_env = shape_env
    fakes.static_shapes = False
    graph = boundary(floor, of_bfloat16(fakes, tokens=any_number(shape_env)))
    (operator,) = [node for node in graph.nodes if str(node.target).startswith("mhc.")]
    (layer_input,) = [user for user in operator.users if user.args[1] == 1]
    with graph.inserting_after(layer_input):
        size = graph.call_function(torch.ops.aten.sym_size.int, (layer_input, 0))
    size.meta["val"] = layer_input.meta["val"].shape[0]
    output = graph.output_node()
    output.args = ((*output.args[0], size),)
    assert passes.lower(graph, mxfp8=True).lowered == {"boundary": 1, "in MXFP8": 1}
    graph.lint()
    assert size.args[0].meta["val"].dtype == NUMBERS


def test_a_size_among_the_numbers(fakes: FakeTensorMode) -> None:
    """It is no constant, and the operator becomes a kernel as ever."""
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    fakes.shape_env = shape_env
    fakes.static_shapes = False

    def by_size(v: Tensor) -> Any:
        blocks, largest = blocks_of(v)
        return quantized(blocks, torch.where(largest < 0, v.shape[0], floored(largest)))

    report = passes.lower(boundary(by_size, of_bfloat16(fakes, tokens=any_number(shape_env))), mxfp8=True)
    assert (report.lowered, report.errors) == ({"boundary": 1}, [])


def test_a_number_that_is_promoted_without_dimensions(fakes: FakeTensorMode) -> None:
    """A bfloat16 tensor without dims times one of float32 is of float32, and one with dims of bfloat16."""
    values = of_bfloat16(fakes, tokens=1, width=32)

    def promoted(v: Tensor) -> Any:
        largest = v.squeeze(0).abs().amax(-1) * torch.full((), 1 + 2.0**-10, device=v.device)
        ratio = (largest.view(1, 1).double() / 448.0).float()
        exponents = torch.where(ratio.isnan(), 255, (ratio.log2().ceil().clamp(-127, 127) + 127).to(torch.uint8))
        factor = torch.exp2(127 - exponents.float())
        factor = torch.where(exponents == 0, 1.0, torch.where(exponents == 255, torch.nan, factor))
        return (v.float() * factor).to(NUMBERS), exponents

    assert passes.lower(boundary(promoted, values), mxfp8=True).lowered == {"boundary": 1}


def test_what_writes_in_place_is_not_evaluated(fakes: FakeTensorMode) -> None:
    """The numbers by which quantizations are known stay as they are."""
    before = mxfp8._blocks().clone()

    def in_place(v: Tensor) -> Any:
        v.clone().mul_(0)
        return floor(v, lower=9)

    for _ in range(2):
        assert passes.lower(boundary(in_place, of_bfloat16(fakes)), mxfp8=True).lowered == {"boundary": 1}
    assert torch.equal(before.view(torch.int16), mxfp8._blocks().view(torch.int16))


@pytest.mark.parametrize("name", ["floor", "rceil"])
def test_numbers_are_those_of_the_program(name: str, fakes: FakeTensorMode) -> None:
    """What identifies a way of scaling has the bits of the program's code, for other numbers as well."""
    quantize, scaling = TAKEN[name]
    torch.manual_seed(0)
    v = (torch.randn(64, 256) * torch.exp2(torch.randint(-130, 127, (64, 1)).float())).bfloat16()
    numbers, exponents, *_ = evaluated(boundary(quantize, of_bfloat16(fakes)), v)
    wanted, wanted_exponents = mxfp8._mxfp8(v.view(-1, 32), scaling)
    assert torch.equal(numbers.view(torch.uint8).flatten(), wanted.view(torch.uint8).flatten())
    assert torch.equal(exponents.view(torch.uint8).flatten(), wanted_exponents.flatten())


@pytest.mark.parametrize(
    ("left", "right", "same"), [(0x7F, 0xFF, True), (0xFF, 0x7F, True), (0x7F, 0x7E, False), (0x00, 0x80, False)]
)
def test_any_nan_is_as_good_as_another(left: int, right: int, same: bool) -> None:
    """But not numbers that differ, and not zeros of two signs."""
    one, other = (torch.tensor([0x38, bits], dtype=torch.uint8).view(NUMBERS) for bits in (left, right))
    assert mxfp8._same_bits(one, other) == same


def test_it_is_an_option(fakes: FakeTensorMode) -> None:
    assert passes.lower(boundary(floor, of_bfloat16(fakes))).lowered == {"boundary": 1}
