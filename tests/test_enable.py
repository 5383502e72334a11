"""`enable` and `disable`: for the whole process, together with any passes that others give Inductor."""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import mhc_compile
from mhc_compile import backend, hooks
from mhc_compile import nn as mhc_nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HOOKS = ("pre_grad_custom_pass", "joint_custom_pre_pass", "post_grad_custom_post_pass")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The passes that run from now on, ours by the names of their hooks; ours do nothing else here."""
    ran: list[Any] = []

    def noting(hook: str) -> Callable[[dict[str, Any]], CustomGraphPass]:
        class Noting(hooks.Configured):
            def __call__(self, graph: fx.Graph) -> None:
                ran.append(hook)

            def uuid(self) -> str:
                return secrets.token_hex()  # no cache knows it

        return Noting

    monkeypatch.setattr(backend, "HOOKS", {hook: noting(hook) for hook in HOOKS})
    yield ran
    mhc_compile.disable()
    for name in ("_maybe_wrap_and_compile_fx_main", "_compile_fx_inner"):
        assert hasattr(getattr(inductor, name), "__code__"), "torch's own function is back"


class Own(CustomGraphPass):
    """A pass of somebody else's."""

    def __init__(self, ran: list[Any]) -> None:
        self.ran = ran

    def __call__(self, graph: fx.Graph) -> None:
        self.ran.append("own")

    def uuid(self) -> str:
        return secrets.token_hex()

    def __deepcopy__(self, known: Any) -> Own:
        return self


def _compile(**kwargs: Any) -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, **kwargs)(torch.ones(2))


def _ran(seen: list[Any], compiling: Callable[[], Any] = _compile) -> list[Any]:
    seen.clear()
    compiling()
    return list(seen)


def _in_thread(function: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_every_thread_and_no_thread(seen: list[Any]) -> None:
    """Whoever calls `enable` and `disable`; one thread has begun and read the settings before."""
    with ThreadPoolExecutor(1) as early:

        def ran_everywhere() -> list[list[Any]]:
            return [
                _ran(seen),
                _ran(seen, lambda: early.submit(_compile).result()),
                _ran(seen, lambda: _in_thread(_compile)),
            ]

        assert ran_everywhere() == [[]] * 3
        _in_thread(mhc_compile.enable)
        assert mhc_compile.is_enabled()
        assert ran_everywhere() == [list(HOOKS)] * 3
        _in_thread(mhc_compile.disable)
        assert not mhc_compile.is_enabled()
        assert ran_everywhere() == [[]] * 3


def test_asyncio_tasks(seen: list[Any]) -> None:
    """A server enables it in the task that starts it up; other tasks compile."""

    async def start() -> None:
        mhc_compile.enable()

    async def handle() -> list[Any]:
        return _ran(seen)

    async def stop() -> None:
        mhc_compile.disable()

    async def serve() -> list[Any]:
        await asyncio.create_task(start())
        enabled = await asyncio.create_task(handle())
        await asyncio.create_task(stop())
        return [enabled, await asyncio.create_task(handle())]

    assert asyncio.run(serve()) == [list(HOOKS), []]


def test_a_backward_graph_that_another_thread_compiles(seen: list[Any]) -> None:
    mhc_compile.enable()
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: x.sin(), dynamic=True)(x).sum()
    _in_thread(y.backward)
    assert seen == [*HOOKS, HOOKS[-1]]


@pytest.mark.parametrize("hook", HOOKS)
def test_passes_of_others_run_first_and_stay(seen: list[Any], hook: str) -> None:
    own = Own(seen)
    both = [one for name in HOOKS for one in (["own", name] if name == hook else [name])]
    options = {"options": {hook: own}}
    mhc_compile.enable()
    assert _ran(seen, lambda: _compile(**options)) == both
    with config.patch({hook: own}):  # assigned later, here alone
        assert _ran(seen) == both
        mhc_compile.disable()
        assert getattr(config, hook) is own
        assert _ran(seen) == ["own"]
        mhc_compile.enable()  # assigned before
        assert _ran(seen) == both
        mhc_compile.disable()
        assert getattr(config, hook) is own
    assert _ran(seen, lambda: _compile(**options)) == ["own"]
    assert getattr(config, hook) is None


def test_several_passes_of_others(seen: list[Any]) -> None:
    with mhc_compile.enable(), config.patch(joint_custom_pre_pass=[Own(seen), Own(seen)]):
        assert _ran(seen) == [HOOKS[0], "own", "own", *HOOKS[1:]]


def test_the_backend_of_that_name_keeps_its_own_passes(seen: list[Any]) -> None:
    mhc_compile.enable()
    assert _ran(seen, lambda: _compile(backend="mhc")) == list(HOOKS)
    options = {"post_grad_custom_post_pass": Own(seen)}
    assert _ran(seen, lambda: _compile(backend="mhc", options=options)) == [*HOOKS[:2], "own", HOOKS[2]]


def test_a_backend_that_has_taken_compile_fx_before(seen: list[Any]) -> None:
    from torch._inductor.compile_fx import compile_fx

    mhc_compile.enable()
    assert _ran(seen, lambda: _compile(backend=lambda gm, given: compile_fx(gm, given))) == list(HOOKS)


def test_kernels_are_launched_from_c_meanwhile(seen: list[Any]) -> None:
    """The setting for kernels that a graph brings along holds while Inductor compiles, and for nobody else."""
    setting = "static_launch_user_defined_triton_kernels"
    values: list[bool] = []

    class Look(Own):
        def __call__(self, graph: fx.Graph) -> None:
            values.append(getattr(config, setting))

    with mhc_compile.enable():
        _compile(options={"joint_custom_pre_pass": Look(seen), "post_grad_custom_post_pass": Look(seen)})
        assert values == [True, True]
        assert not getattr(config, setting)


def test_blocks_end_in_any_order(seen: list[Any]) -> None:
    first, second = mhc_compile.enable(), mhc_compile.enable({"mhc.lower": False})
    with second:
        with first:
            assert _ran(seen) == list(HOOKS)
        assert mhc_compile.is_enabled()
        assert backend._enabled == [second]
    assert not mhc_compile.is_enabled()
    with mhc_compile.enable():
        mhc_compile.disable()
        assert not mhc_compile.is_enabled()
        mhc_compile.enable()
    assert mhc_compile.is_enabled(), "the one of the block has ended before, and the other lasts"


def test_disable_is_for_all_calls_of_enable(seen: list[Any]) -> None:
    for _ in range(3):
        mhc_compile.enable()
    mhc_compile.disable()
    assert not mhc_compile.is_enabled()
    assert _ran(seen) == []
    mhc_compile.disable()


def test_functions_that_others_wrap_meanwhile_are_theirs(seen: list[Any]) -> None:
    mhc_compile.enable()
    ours = inductor._compile_fx_inner
    torchs = ours.__wrapped__

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append("theirs")
        return ours(*args, **kwargs)

    inductor._compile_fx_inner = theirs
    try:
        assert _ran(seen) == [*HOOKS[:2], "theirs", HOOKS[2]]
        mhc_compile.disable()
        assert not {*HOOKS} & {*_ran(seen)}
        mhc_compile.enable()
        assert _ran(seen) == [*HOOKS[:2], "theirs", HOOKS[2]]
        mhc_compile.disable()
        assert inductor._compile_fx_inner is theirs
    finally:
        inductor._compile_fx_inner = torchs


def test_many_threads_switch_at_once(seen: list[Any]) -> None:
    begin = threading.Barrier(8)

    def switch() -> None:
        begin.wait()
        for _ in range(50):
            with mhc_compile.enable():
                assert mhc_compile.is_enabled()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(switch) for _ in range(8)]:
            done.result()
    assert not mhc_compile.is_enabled()


def test_wrong_options() -> None:
    for options, message in (
        ({"mhc.no_such": True}, "unknown option 'mhc.no_such'"),
        ({"MHC.strict": True}, "unknown option 'MHC.strict'; did you mean 'mhc.strict'"),
        ({"mhc.strict": 1}, "expected True or False"),
        ({"max_autotune": True}, "max_autotune is not an option of mhc"),
        ({1: True}, "1 is not an option of mhc"),
        ("mhc.strict", "expected a dict such as .*, got 'mhc.strict'"),
    ):
        with pytest.raises(ValueError, match=message):
            mhc_compile.enable(options)  # type: ignore[arg-type]
        assert not mhc_compile.is_enabled()


def test_what_fails_while_settings_are_made_leaves_a_graph_as_it_was(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("planted")

    mhc_compile.enable()
    monkeypatch.setattr(backend, "chained", broken)
    assert _ran(seen) == []
    assert "a plain torch.compile is not rewritten: RuntimeError: planted" in caplog.text


@pytest.mark.usefixtures("fresh_cache")
def test_a_model_in_another_thread() -> None:
    """With the passes themselves: a model that a worker thread compiles is rewritten."""
    found: list[int] = []

    def work() -> None:
        with torch.no_grad():
            torch.compile(mhc_nn.HyperConnection(torch.nn.Linear(8, 8), dim=8))(torch.randn(2, 3, 4, 8))
        found.append(len(mhc_compile.report().rewritten))

    with mhc_compile.enable():
        _in_thread(work)
    assert found == [2]


@pytest.mark.parametrize("strict", [False, True])
def test_the_backend_of_that_name_has_its_own_options(strict: bool) -> None:
    """Those of `enable` are neither added to them, nor in their place."""

    def failing(graph: fx.Graph) -> None:
        raise ValueError("planted")

    model, x = mhc_nn.HyperConnection(torch.nn.Linear(8, 8), dim=8), torch.randn(2, 3, 4, 8)
    options = {"mhc.strict": strict, "joint_custom_pre_pass": failing}
    with (
        mhc_compile.enable({"mhc.strict": not strict}),
        torch.no_grad(),
        pytest.raises(Exception, match="planted") as raised,
    ):
        torch.compile(model, backend="mhc", options=options)(x)
    assert isinstance(raised.value, mhc_compile.StrictError) == strict


def test_none_in_options_is_no_pass(seen: list[Any]) -> None:
    """As in Inductor, it stands for the configured ones."""
    with config.patch(dict.fromkeys(HOOKS, Own(seen))):
        for none in (dict.fromkeys(HOOKS), {hook.replace("_", "-"): None for hook in HOOKS}):
            assert _ran(seen, lambda none=none: _compile(options=none)) == []
            assert _ran(seen, lambda none=none: _compile(backend="mhc", options=none)) == list(HOOKS)
