"""The judgement of two evaluations: chance is forgiven, and what chance does not explain is not."""

from __future__ import annotations

import math

import pytest
import torch

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


def test_names_must_agree() -> None:
    with pytest.raises(ValueError, match=r"only one of the two evaluations has \['b'\]"):
        Errors().add({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
