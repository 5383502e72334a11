"""The forward in one pass, of boundary and of generate_mix_and_aggregate: on a CPU the pass is what it computes, on a
GPU it is that of two kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile.kernels import (
    boundary,
    boundary_pass,
    common,
    expand_combine,
    generate_mix_and_aggregate,
    gpus,
)
from mhc_compile.kernels.common import cdiv, recorded
from mhc_compile.kernels.opaque import Opaque
from tests.kernels.cases import CAPTURES, DEVICE, FORMS, MARKS, USUAL, draw, keywords, mix_case
from tests.kernels.gluon import GPU
from tests.kernels.holder import Holder, wait_until
from tests.kernels.test_boundary import before, check
from tests.kernels.test_mix import check as check_mix

pytestmark = MARKS
BF16 = torch.bfloat16
KERNEL, REST = "boundary_pass_kernel", "boundary_rest_kernel"


@pytest.fixture
def communication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_pass, "communicates", lambda: True)


@pytest.fixture
def any_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_pass, "pays", lambda x: True)
    if DEVICE == "cpu":
        monkeypatch.setattr(gpus, "processors", lambda device: 132)


@pytest.mark.usefixtures("any_tokens")
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("tokens", "width", "norm"), [(70, 528, True), (33, 512, False), (1, 640, True)])
def test_shapes(tokens: int, width: int, norm: bool, n: int, launched: list[str]) -> None:
    case = mix_case(tokens, n, width, dtype=BF16, norm=norm)
    check(before(tokens, n, width, BF16, bias=False), case)
    assert KERNEL in launched


@pytest.mark.usefixtures("any_tokens")
@pytest.mark.parametrize(
    ("n", "parts", "more"), [(4, 2, 2), (4, 2, 0), (4, 1, 11), (4, 2, 16), (2, 2, 13), (2, 3, 16), (2, 1, 0)]
)
@pytest.mark.parametrize("norm", [True, False])
def test_other_rows(n: int, parts: int, more: int, norm: bool, launched: list[str]) -> None:
    """Fewer gates, and rows without gates, up to the most that there is room for; of the boundary and of the mix."""
    case = mix_case(70, n, 528, dtype=BF16, norm=norm, parts=parts, more=more, grouped=norm)
    check(before(70, n, 528, BF16, bias=False), case)
    check_mix(case, FORMS[USUAL])
    assert launched.count(KERNEL) == 2


@pytest.mark.skipif(DEVICE != "cpu", reason="what torch computes in the kernel's place")
@pytest.mark.usefixtures("any_tokens")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_reaches_it(form: str, launched: list[str]) -> None:
    check(before(3, 4, 512, BF16, bias=False), mix_case(3, 4, 512, dtype=BF16, grouped=False), form)
    assert KERNEL in launched


@pytest.mark.usefixtures("any_tokens")
def test_an_input_norm_takes_whole_rows(launched: list[str]) -> None:
    """Which no program of the pass has."""
    case = mix_case(5, 4, 64, dtype=BF16)
    args = before(5, 4, 64, BF16, bias=False)
    boundary.forward(*args, *case.parameters[1:], **keywords(FORMS[USUAL]), input_norm_eps=1e-6)
    assert launched == ["combine_project_kernel"]


@pytest.mark.usefixtures("any_tokens")
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("tokens", "width", "norm"), [(72, 528, True), (1, 640, False)])
def test_streams_that_are_given(tokens: int, width: int, norm: bool, n: int, launched: list[str]) -> None:
    check_mix(mix_case(tokens, n, width, dtype=BF16, norm=norm), FORMS[USUAL])
    assert launched == [KERNEL]


@pytest.mark.usefixtures("hopper")
def test_few_tokens_of_given_streams(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_pass, "launched_by_host", lambda device: False)
    check_mix(mix_case(5, 4, 4096, dtype=BF16), FORMS[USUAL])
    assert launched == ["combine_project_kernel"]


@pytest.mark.usefixtures("any_tokens")
def test_given_streams_that_it_is_not_for(launched: list[str]) -> None:
    """Before an input norm, and where a token's streams do not lie side by side."""
    case = mix_case(6, 4, 512, dtype=BF16)
    x, *parameters = case.parameters
    assert x is not None
    form = keywords(FORMS[USUAL])
    generate_mix_and_aggregate.forward(x, *parameters, **form, input_norm_eps=1e-6)  # type: ignore[arg-type]
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    generate_mix_and_aggregate.forward(turned, *parameters, **form)  # type: ignore[arg-type]
    assert launched == []


def _fits(tokens: int = 2048, n: int = 4, width: int = 4096, rows: int | None = None) -> bool:
    x = torch.empty(tokens, n, width, dtype=BF16, device="meta")
    phi = torch.empty(n * (n + 2) if rows is None else rows, n * width, device="meta")
    return boundary_pass.fits(x, phi) and boundary_pass.pays(x)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "of", lambda device: gpus.TABLE[90])
    monkeypatch.setattr(gpus, "processors", lambda device: 132)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "case",
    [
        {"width": 1024, "tokens": 6143},
        {"rows": 25},
        {"width": 6144},
        {"width": 16384},
        {"width": 448, "tokens": 1 << 15},
    ],
    ids=str,
)
def test_what_it_is_not_for(case: dict[str, Any]) -> None:
    """6,144 columns leave a quarter of the GPU idle, 16,384 have room for a single team, and with 448 a program would
    own more than four tokens of a tile."""
    assert _fits()
    assert not _fits(**case)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("replayed", [False, True])
def test_a_launch_less_for_the_host(replayed: bool) -> None:
    """With few tokens, unless a CUDA graph launches."""
    with recorded(lambda *args: None, replayed=replayed):
        assert _fits(tokens=64) != replayed
        assert _fits(tokens=384)


@GPU
@CAPTURES
def test_a_launch_less_where_it_is_captured() -> None:
    seen = []
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        seen.append(common.launched_by_host(torch.device("cuda")))
    assert [*seen, common.launched_by_host(torch.device("cuda"))] == [False, True]


@pytest.mark.skipif(DEVICE != "cpu", reason="what torch computes in the kernels' place")
@pytest.mark.usefixtures("any_tokens", "communication")
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_tiles_that_no_team_has_drawn(tokens: int, launched: list[str]) -> None:
    """Are done by the kernel after it, whatever has to be made of the others."""
    check(before(tokens, 4, 512, BF16, bias=False), mix_case(tokens, 4, 512, dtype=BF16))
    check_mix(mix_case(tokens, 2, 512, dtype=BF16, norm=True), FORMS[USUAL])
    assert [name for name in launched if "gradients" not in name] == [KERNEL, REST, KERNEL, REST]


@pytest.mark.usefixtures("hopper", "communication")
def test_beside_communication() -> None:
    """A second launch costs more than few tokens save, and drawing tiles more than several tokens for each program.
    7,168 columns have two teams, of which communication may leave one no room.
    """
    assert _fits()
    assert _fits(tokens=384)
    assert not _fits(tokens=383)
    assert not _fits(tokens=8192, width=1024)
    assert not _fits(width=7168)


@pytest.mark.usefixtures("hopper", "communication")
def test_beside_communication_with_the_memory_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes over 4 streams take as long there, and less while communication leaves no room for a team."""
    monkeypatch.setattr(gpus, "bytes_per_second", lambda device: 4.9e12)
    assert not _fits()
    assert _fits(n=2)


def _case(
    tokens: int, width: int, seed: int = 0, *, n: int = 4, norm: bool = False, grouped: bool = True
) -> list[Tensor | None]:
    torch.manual_seed(seed)
    rows = n * (n + 2)
    x, f = draw(tokens, n, width, dtype=BF16), draw(tokens, width, dtype=BF16)
    gates = draw(tokens, n), draw(tokens, n, n, scale=0.5)
    phi, weight = draw(rows, n * width, scale=0.1), draw(n * width) if norm else None
    return [f, None, gates[0], x, gates[1], phi, draw(3 if grouped else rows), draw(rows), weight]


def _apart(monkeypatch: pytest.MonkeyPatch, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(boundary_pass, "pays", lambda x: False)
        return run()


@GPU
@pytest.mark.usefixtures("any_tokens")
@pytest.mark.parametrize("form", ["deepseek", "transformer_engine", "megatron", "columns_first_exp", "plain_exp"])
@pytest.mark.parametrize(
    ("tokens", "width", "options"),
    [
        (8192, 4096, {}),
        (4097, 7168, {"norm": True}),
        (5000, 2560, {"grouped": False}),
        (4100, 1296, {}),
        (4096, 464, {}),
        (20000, 1024, {}),
        (20000, 4096, {}),
        (8192, 4096, {"n": 2}),
        (5000, 7168, {"n": 2, "norm": True}),
        (4100, 1296, {"n": 2, "grouped": False}),
        (30000, 464, {"n": 2}),
    ],
    ids=str,
)
def test_to_the_bits_of_two_kernels(
    tokens: int, width: int, options: dict[str, Any], form: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are tested against float64, and whose bits do not depend on the number of tokens."""
    args = _case(tokens, width, **options)

    def run() -> tuple[Tensor, ...]:
        return boundary.forward(*args, **keywords(FORMS[form]))  # type: ignore[arg-type]

    for value, apart in zip(run(), _apart(monkeypatch, run), strict=True):
        assert torch.equal(value, apart)
    assert launched == [KERNEL, "combine_project_kernel"]


@GPU
@pytest.mark.usefixtures("any_tokens")
@pytest.mark.parametrize("form", ["deepseek", "megatron"])
@pytest.mark.parametrize(
    ("tokens", "width", "options"),
    [
        (8192, 4096, {}),
        (4097, 7168, {"norm": True}),
        (4100, 1296, {"grouped": False}),
        (20000, 4096, {"n": 2}),
        (4100, 464, {"n": 2, "norm": True}),
        (3, 4096, {}),
    ],
    ids=str,
)
def test_given_streams_to_the_bits_of_a_boundary(
    tokens: int, width: int, options: dict[str, Any], form: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the combine is in the same pass, in a kernel before it, or nowhere."""
    args = _case(tokens, width, **options)
    before, parameters = args[:5], args[5:]
    new = expand_combine.forward(*before)  # type: ignore[arg-type]

    def run() -> tuple[Tensor, ...]:
        return generate_mix_and_aggregate.forward(new, *parameters, **keywords(FORMS[form]))  # type: ignore[arg-type]

    of_boundary = boundary.forward(*args, **keywords(FORMS[form]))  # type: ignore[arg-type]
    assert torch.equal(new, of_boundary[0])
    for value, apart, whole in zip(run(), _apart(monkeypatch, run), of_boundary[1:], strict=True):
        assert torch.equal(value, apart)
        assert torch.equal(value, whole)
    assert launched == [KERNEL, KERNEL, "combine_project_kernel"]


DRAWN_CASES = [
    (8192, 4096, {}),
    (4097, 7168, {"norm": True}),
    (5000, 2560, {"grouped": False}),
    (4096, 464, {}),
    (384, 4096, {}),
    (1, 4096, {}),
    (8192, 4096, {"n": 2}),
    (5000, 464, {"n": 2}),
]


def _boundary_and_given(args: list[Tensor | None]) -> list[Tensor]:
    """The results of a boundary, and of its own streams if they were given."""
    form = keywords(FORMS[USUAL])
    given = generate_mix_and_aggregate.forward(args[3], *args[5:], **form)  # type: ignore[arg-type]
    return [*boundary.forward(*args, **form), *given]  # type: ignore[arg-type]


@GPU
@pytest.mark.usefixtures("any_tokens", "communication")
@pytest.mark.parametrize(("tokens", "width", "options"), DRAWN_CASES, ids=str)
def test_drawn_tiles_to_the_bits_of_two_kernels(
    tokens: int, width: int, options: dict[str, Any], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = _case(tokens, width, **options)
    expected = _apart(monkeypatch, lambda: tuple(_boundary_and_given(args)))
    launched.clear()
    for _ in range(10):
        assert all(map(torch.equal, _boundary_and_given(args), expected))
    assert launched == 20 * [KERNEL, REST]


@GPU
@pytest.mark.usefixtures("any_tokens", "communication")
@pytest.mark.parametrize("begun", [1, 0.5, 1.5])
@pytest.mark.parametrize(("tokens", "width", "options"), DRAWN_CASES, ids=str)
def test_teams_that_do_not_fill_up(
    tokens: int, width: int, options: dict[str, Any], begun: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no more programs find room: one, half a team, or one and a half."""
    args = _case(tokens, width, **options)
    expected = _apart(monkeypatch, lambda: tuple(_boundary_and_given(args)))

    def start(kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(kernel, Opaque) and kernel.kernel.__name__ == KERNEL:
            grid = (1 if begun == 1 else int(begun * cdiv(width, boundary_pass.COLUMNS)),)
        kernel[grid](*given, **kwargs)

    with recorded(start):
        found = _boundary_and_given(args)
    assert all(map(torch.equal, found, expected))


@GPU
@pytest.mark.usefixtures("any_tokens", "communication")
@pytest.mark.parametrize("held", [8, 40, 90, 110, 130])
def test_processors_that_are_held(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends while another kernel holds these, and waits for nothing; with 110, no team has room."""
    args = _case(8192, 4096)
    expected = _apart(monkeypatch, lambda: tuple(_boundary_and_given(args)))
    _boundary_and_given(args)  # kernels are loaded, for which a GPU may have to be idle
    with Holder(held):
        found = _boundary_and_given(args)
        ended = torch.cuda.Event()
        ended.record()
        assert wait_until(ended.query)
    assert all(map(torch.equal, found, expected))


@GPU
@pytest.mark.usefixtures("any_tokens", "communication")
def test_a_gpu_that_is_held_until_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _case(8192, 4096)
    expected = _apart(monkeypatch, lambda: tuple(_boundary_and_given(args)))
    _boundary_and_given(args)
    for _ in range(5):
        with Holder(gpus.processors(torch.device("cuda"))):
            found = _boundary_and_given(args)
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))


@GPU
@pytest.mark.usefixtures("any_tokens")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """phi of these, bfloat16 gates, and a layer input of another dtype."""
    f, bias, post, x, res, phi, *rest = _case(4096, 1024)
    assert post is not None
    assert res is not None
    assert phi is not None

    def run() -> tuple[Tensor, ...]:
        args = f, bias, post.to(BF16), x, res.to(BF16), phi.to(dtype), *rest
        return boundary.forward(*args, **keywords(FORMS[USUAL]), out_dtype=dtype)  # type: ignore[arg-type]

    for value, apart in zip(run(), _apart(monkeypatch, run), strict=True):
        assert value.dtype == apart.dtype
        assert torch.equal(value, apart)


@GPU
@CAPTURES
@pytest.mark.parametrize("drawn", [False, True])
def test_several_at_once_and_in_a_graph(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs wait for each other: each launch has to have all of its own on the GPU, whatever else is to run."""
    monkeypatch.setattr(boundary_pass, "communicates", lambda: drawn)
    cases = [_case(8192, 4096, seed) for seed in range(3)]
    form = keywords(FORMS[USUAL])
    expected = [boundary.forward(*case, **form) for case in cases]  # type: ignore[arg-type]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                found.append(boundary.forward(*case, **form))  # type: ignore[arg-type]
                torch.mm(torch.ones(2048, 2048, device="cuda"), torch.ones(2048, 2048, device="cuda"))
        torch.cuda.synchronize()
        for values, wanted in zip(found, expected, strict=True):
            assert all(map(torch.equal, values, wanted))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = boundary.forward(*cases[0], **form)  # type: ignore[arg-type]
    for _ in range(3):
        for value in values:
            value.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, values, expected[0]))
