"""The judgement of two evaluations: chance is forgiven, and what chance does not explain is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mhc_compile.testing import Errors, judge

_BOTH = ["phi, where it vanishes", "phi, where it vanishes, at worst"]
SIZES = {"large": 5000, "scale": 3, "other scale": 3, "nought": 10}


def _errors(noise: dict[str, float]) -> Errors:
    exact = {name: torch.zeros(size) if name == "nought" else torch.ones(size) for name, size in SIZES.items()}
    errors = Errors()
    errors.add({name: value + noise.get(name, 1e-5) for name, value in exact.items()}, exact)
    return errors


@pytest.mark.parametrize(
    ("name", "noise", "failing"),
    [
        ("large", 1.1e-5, []),
        ("large", 1.4e-5, ["all results", "large"]),
        ("scale", 2.2e-5, []),
        ("scale", 9e-5, ["2 small results", "scale"]),
        ("large", float("nan"), ["all results", "large"]),
    ],
)
def test_margins(name: str, noise: float, failing: list[str]) -> None:
    trusted = _errors({"nought": 1e-13})
    found = judge(trusted, _errors({"nought": 1e-13, name: noise}), list(SIZES), "results")
    assert [finding.what for finding in found if not finding.ok] == failing


def test_a_gradient_that_vanishes_has_the_size_of_its_group() -> None:
    trusted = _errors({"nought": 1e-13})
    found = judge(trusted, _errors({"nought": 5e-13}), list(SIZES), "results")
    assert all(finding.ok for finding in found)
    found = judge(trusted, _errors({"nought": 1e-3}), list(SIZES), "results")
    assert not all(finding.ok for finding in found)


@pytest.mark.parametrize(("own", "fails"), [(5e-13, False), (1e-12, True), (1e-6, True)])
def test_a_value_that_vanishes_has_the_size_of_its_group(own: float, fails: bool) -> None:
    """Such as the rows of phi that make h_res, whose gradient is 0 where all streams are equal."""
    exact = torch.ones(24, 100, dtype=torch.float64)
    exact[8:] = 0.0

    def errors(vanishing: float) -> Errors:
        found = Errors()
        found.add({"phi": exact + torch.where(exact == 0.0, vanishing, 1e-5)}, {"phi": exact})
        return found

    # The root mean square of all is 1 / sqrt(3).
    found = judge(errors(1e-14), errors(own), ["phi"], "gradients")
    assert [finding.what for finding in found if not finding.ok] == _BOTH * fails
    assert all(finding.ok for finding in judge(errors(own / 9), errors(own), ["phi"], "gradients"))
    assert all(finding.ok for finding in judge(errors(1e-14), errors(own), ["phi"], "outputs", vanishing=False))


@pytest.mark.parametrize(
    ("ours", "failing"),
    [
        ([1e-9, 1e-13, 1e-14], []),
        ([1e-8, 1e-13, 1e-14], []),  # chance, in the one evaluation where much is left
        ([1e-9, 1e-10, 1e-14], _BOTH[:1]),
        ([1e-9, 1e-10, 1e-6], _BOTH),
        ([1e-14, 1e-14, 1e-6], _BOTH[1:]),
        ([1e-9, float("nan"), 1e-14], _BOTH),
    ],
)
def test_evaluations_where_values_vanish_are_judged_one_by_one(ours: list[float], failing: list[str]) -> None:
    exact = torch.ones(24, 100, dtype=torch.float64)
    exact[8:] = 0.0

    def errors(left: list[float]) -> Errors:
        found = Errors()
        for each in left:
            found.add({"phi": exact + torch.where(exact == 0.0, each, 1e-5)}, {"phi": exact})
        return found

    found = judge(errors([1e-9, 1e-13, 1e-14]), errors(ours), ["phi"], "gradients")
    judged = [finding for finding in found if finding.what in _BOTH]
    assert [finding.what for finding in judged if not finding.ok] == failing


@pytest.mark.parametrize("own", [1e-11, 1e-7])
def test_a_small_tensor_that_vanishes_has_no_floor(own: float) -> None:
    trusted = _errors({"nought": 1e-13})
    for noise in (1e-13, own):
        found = judge(trusted, _errors({"nought": noise}), list(SIZES), "gradients")
        assert [finding.what for finding in found if not finding.ok] == ["nought"] * (noise == own)


@pytest.mark.parametrize(
    ("eager", "ours", "failing"),
    [
        (1e-9, 1.1e-9, []),
        (1e-9, 2e-9, ["all results"]),
        (1e-9, 5.0, ["all results", "a", "b"]),
        (1e-9, math.inf, ["all results", "a", "b"]),
        (1e-9, math.nan, ["all results", "a", "b"]),
        (0.0, 0.0, []),
        (0.0, 1e-30, ["all results", "a", "b"]),
        (math.inf, 1.0, ["all results", "a", "b"]),  # no error of another evaluation shows what is right
    ],
)
@pytest.mark.parametrize("vanishing", [False, True])
def test_where_all_exact_values_are_zero(eager: float, ours: float, failing: list[str], vanishing: bool) -> None:
    exact = {"a": torch.zeros(2000, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}

    def errors(error: float) -> Errors:
        found = Errors()
        found.add({name: value + error for name, value in exact.items()}, exact)
        return found

    found = judge(errors(eager), errors(ours), list(exact), "results", vanishing=vanishing)
    assert [finding.what for finding in found if not finding.ok] == failing
    assert all((finding.excess <= 1) == finding.ok for finding in found)


@pytest.mark.parametrize("usual", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("exact", "ours", "ok"),
    [
        (1.0, 1.0, True),
        (1.0, 1.2, True),  # what rounds to NaN for another order of sums may round a lot
        (1.0, -7.0, False),
        (1.0, 0.0, False),
        (0.0, 1e-5, True),
        (0.0, 1.0, False),
        (1e39, 3.4e38, True),  # float32 reaches no further
        (1e39, 0.0, False),
        (1e39, -3.4e38, False),
        (math.nan, 5.0, False),
    ],
)
def test_a_number_where_eager_code_has_none(usual: float, exact: float, ours: float, ok: bool) -> None:
    """It is right if it is float64's, but for roundings that nothing measures."""
    where = torch.arange(2000) < 1000
    wide = torch.ones(2000, dtype=torch.float64).masked_fill(where, exact)
    of_eager = torch.ones(2000).masked_fill(where, usual)
    of_ours = torch.ones(2000).masked_fill(where, ours)
    for vanishing in (False, True):
        trusted, found = Errors(), Errors()
        trusted.add({"y": of_eager}, {"y": wide}, {"y": of_eager})
        found.add({"y": of_ours}, {"y": wide}, {"y": of_eager})
        assert all(finding.ok for finding in judge(trusted, trusted, ["y"], "results", vanishing=vanishing))
        assert all(finding.ok for finding in judge(trusted, found, ["y"], "results", vanishing=vanishing)) == ok


@pytest.mark.parametrize("ours", [math.inf, 5.0])
def test_what_vanishes_only_where_eager_code_has_no_number(ours: float) -> None:
    exact, usual = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), torch.tensor([math.nan, 1.0, 2.0])
    trusted, found = Errors(), Errors()
    trusted.add({"phi": usual}, {"phi": exact}, {"phi": usual})
    found.add({"phi": torch.tensor([ours, 1.0, 2.0])}, {"phi": exact}, {"phi": usual})
    judged = judge(trusted, found, ["phi"], "gradients")
    assert [finding.what for finding in judged if not finding.ok] == ["all gradients", "phi", *_BOTH]


@pytest.mark.parametrize(
    ("size", "eager", "ours", "ok"),
    [(100, 4, 6, True), (100, 4, 7, False), (10000, 0, 1, True), (10000, 0, 2, False), (40000, 400, 450, True)],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_counted(size: int, eager: int, ours: int, ok: bool, dtype: torch.dtype) -> None:
    """Of N, as many may differ as eager's do, times 1.1 + 5 / sqrt(N), and one in 10,000."""
    exact = torch.zeros(size, dtype=dtype)

    def errors(differing: int) -> Errors:
        found = Errors()
        found.add({"y": (torch.arange(size) < differing).to(dtype)}, {"y": exact})
        return found

    assert [finding.ok for finding in judge(errors(eager), errors(ours), ["y"], "outputs")] == [ok]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_another_dtype(dtype: torch.dtype) -> None:
    """Its roundings are no excuse, and it is wrong itself."""
    exact = torch.arange(5000, dtype=torch.float64)
    trusted, errors = Errors(), Errors()
    trusted.add({"y": exact.float() + 1e-3}, {"y": exact})
    errors.add({"y": exact.to(dtype)}, {"y": exact})
    assert all(finding.ok for finding in judge(trusted, trusted, ["y"], "outputs"))
    failing = [finding.what for finding in judge(trusted, errors, ["y"], "outputs") if not finding.ok]
    assert failing[0] == f"y, {dtype} and not torch.float32"
    assert ("y" in failing) == (dtype in (torch.bfloat16, torch.float16))


def test_names_must_agree() -> None:
    with pytest.raises(ValueError, match=r"only one of the two evaluations has \['b'\]"):
        Errors().add({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})


@pytest.mark.parametrize("usual", [0.0, math.nan])
def test_dtensors_are_judged(tmp_path: Path, usual: float) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        exact = distribute_tensor(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), mesh, [Shard(0)])
        value = distribute_tensor(torch.tensor([usual, 1.0, 2.0]), mesh, [Shard(0)])
        errors = Errors()
        errors.add({"phi": value}, {"phi": exact}, {"phi": value})
        assert all(finding.ok for finding in judge(errors, errors, ["phi"], "results"))
    finally:
        torch.distributed.destroy_process_group()
