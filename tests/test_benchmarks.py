"""The runner of the benchmarks, on a CPU at sizes that take no time."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cases, measure, providers, runner, traffic
from benchmarks.cases import FEW, Case, complaints, errors, workload
from benchmarks.measure import Meter, OutOfTime, Sample, in_process
from benchmarks.plan import FIRST, PARTS, PROCESS, SHIFTED, plan
from mhc_compile import ops, records

CPU = torch.device("cpu")
TINY = Case("chain", 6, 32, depth=2, dtype="float32")


def bench(**given: Any) -> runner.Runner:
    return runner.Runner(CPU, Meter(CPU), 10.0, **given)


def run(case: Case, *names: str) -> list[dict[str, Any]]:
    return bench().run(case, names)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_whole_runner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "cpu.json"
    arguments = ["--device", "cpu", "--quick", "--no-first-step", "--out", str(out)]
    arguments += ["--parts", "main", "--providers", "mhc-ops", "liger", "eager"]
    status = command.main(arguments)
    assert status == 0
    first = json.loads(out.read_text())["results"]
    # The others are kept as they are, and only what is missing is measured.
    status = command.main([*arguments, "mhc", "--continue", str(out)])
    content = json.loads(out.read_text())
    assert content["results"][:2] == first
    assert len(content["results"]) == 3
    assert content["complete"]
    assert "liger" in content["not_installed"]
    assert status == 0
    assert content["torch"] == torch.__version__
    assert {"hardware", "triton", "date", "commit", "copy_gb_s"} <= content.keys()
    found = {(r["case"]["tokens"], r["provider"]): r for r in content["results"]}
    for provider in ("eager", "mhc", "mhc-ops"):
        result = found[6, provider]
        assert result["status"] == "ok", result
        assert 0 < result["step_ms"]["p20"] <= result["step_ms"]["median"] <= result["step_ms"]["p80"]
        assert result["forward_ms"]["median"] > result["forward_floor_ms"] > 0
        names = {"output", "x", "connections.0.fn", "connections.1.fn", "*.base", "*.scale"}
        assert result["errors"].keys() == names
        assert max(result["errors"].values()) < 1e-4
    # The mix, a boundary, the combine, 9 + 18 + 9 units, and backward 14 + 32 + 14.
    assert (found[6, "mhc"]["forward_units"], found[6, "mhc"]["step_units"]) == (16, 42)
    assert found[6, "eager"]["step_units"] > 100
    printed = capsys.readouterr().out
    assert "| mhc-ops |" in printed
    assert "chain of 2: 6 x 32" in printed


@pytest.mark.parametrize("spoiled", ["output", "gradient", "forward alone"])
def test_no_speed_for_wrong_results(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by 2 %, where float32 is off by 1e-6: in the output, in one small parameter's gradient, without gradients."""

    def wrong(work: Any, mode: str | None) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            right = work.module(x)
            if spoiled == "gradient":
                scale = work.module.connections[1].scale
                return right + 0.02 * (scale - scale.detach()).sum() * right.detach()
            return 1.02 * right if spoiled == "output" or not torch.is_grad_enabled() else right

        return call

    monkeypatch.setitem(providers.PROVIDERS, "wrong", wrong)
    eager, result = run(TINY, "eager", "wrong")
    assert eager["status"] == "ok"
    assert result["status"] == "refused"
    assert ("*.scale" if spoiled == "gradient" else "output") in result["reason"]
    assert [key for key in result if key.endswith(("_ms", "_us", "_seconds"))] == ["forward_floor_ms", "step_floor_ms"]


def test_a_missing_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def detached(work: Any, mode: str | None) -> Any:
        parameters = {name: p.detach() for name, p in work.module.named_parameters()}
        return lambda x: torch.func.functional_call(work.module, parameters, (x,))

    monkeypatch.setitem(providers.PROVIDERS, "detached", detached)
    (result,) = run(TINY, "detached")
    assert result["status"] == "refused"
    assert "no gradient for connections.0.base" in result["reason"]


def test_a_provider_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(work: Any, mode: str | None) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(providers.PROVIDERS, "failing", failing)
    failed, eager = run(replace(TINY, modes=("forward",)), "failing", "eager")
    assert (failed["status"], failed["reason"]) == ("failed", "RuntimeError: no such kernel")
    assert eager["status"] == "ok"


def test_the_reference_in_chunks_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload(TINY, CPU)
    whole = work.reference()
    # A chunk is of at least one token; a depth of a billion makes it one.
    work.case = replace(TINY, depth=10**9)
    # The same sums in another order: float64 rounding.
    assert max(errors(work.reference(), whole).values()) < 1e-13


@pytest.mark.parametrize("name", ["block", "plain", "model"])
def test_parts_of_a_model(name: str) -> None:
    work = workload(Case(name, 16, 32, depth=4 if name == "model" else 2, dtype="float32"), CPU)
    judge = runner.Judge(work)
    hyper = {key for key in judge.reference if "hc" in key}
    assert bool(hyper) == (name != "plain")
    assert ("x" in judge.reference) == (name != "model")
    # float32 against float64 through one or two layers.
    assert max(judge.of_eager.values()) < 1e-4


def test_plain_residuals() -> None:
    """Both sublayers are added to the one stream: nothing else is between x and the output."""
    work = workload(Case("plain", 16, 32, depth=2, dtype="float32"), CPU)
    (x,) = work.arguments
    assert x.shape == (1, 16, 32)
    added = []
    (layer,) = work.module.model.layers  # type: ignore[union-attr, misc]
    layer.self_attn.register_forward_hook(lambda module, given, result: added.append(result[0]))
    layer.mlp.register_forward_hook(lambda module, given, result: added.append(result))
    assert torch.equal(work.forward(work.module), x + added[0] + added[1])


def test_another_layout() -> None:
    work = workload(TINY, CPU)
    before = work.step(work.module)
    with work.channels_first():
        (x,) = work.arguments
        assert x.stride()[-2:] == (1, TINY.streams)
        assert work.upstream.stride()[-2:] == (1, TINY.streams)
        values = work.step(work.module)
    assert work.arguments[0].is_contiguous()
    # The same numbers in other places: float32 sums in another order.
    assert max(errors(values, before).values()) < 1e-5


def gates(x: torch.Tensor, phi: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, **form: Any) -> Any:
    """h_pre, h_post, h_res of [.., n, C] streams with 20 Sinkhorn iterations."""
    return ops.generate_mix(x, phi, scale, bias, sinkhorn_steps=39, **form)


def like_liger() -> Any:
    """Liger-Kernel 0.8.5's signatures: phi as [n C, K], scalars for scale, h_res [to, from]."""

    def coeffs(
        x: Any, phi: Any, b: Any, alpha_pre: Any, alpha_post: Any, alpha_res: Any, *,
        allow_fp32: bool, tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    ) -> Any:  # fmt: skip
        assert (tmax, allow_fp32) == (20, False)
        scale = torch.stack([alpha_pre, alpha_post, alpha_res])
        form = {"rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps, "post_mult": post_mult}
        return gates(x, phi.t(), scale, b, **form)

    def post_res(x: Any, f: Any, h_post: Any, h_res: Any) -> Any:
        return (h_post[..., None] * f[..., None, :].float() + h_res @ x.float()).to(x.dtype)

    return SimpleNamespace(liger_mhc_coeffs=coeffs, liger_mhc_pre=ops.aggregate, liger_mhc_post_res=post_res)


def like_tile_kernels() -> Any:
    """TileKernels 1.0.0's signatures: h_post as [.., n, 1], h_res [from, to]."""

    def mhc_pre(
        residual: Any, fn: Any, scale: Any, base: Any, *, norm_eps: float, mhc_mult: int, post_mult_value: float,
        pre_eps: float, sinkhorn_eps: float, sinkhorn_repeat: int,
    ) -> Any:  # fmt: skip
        assert (mhc_mult, sinkhorn_repeat) == (4, 20)
        form = {"rms_eps": norm_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps, "post_mult": post_mult_value}
        pre, post, res = gates(residual, fn, scale, base, **form)
        return ops.aggregate(residual, pre), (post.unsqueeze(-1), res)

    def mhc_post(x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any) -> Any:
        return ops.expand_combine(x, None, post_layer_mix.squeeze(-1), residual, comb_res_mix)

    return SimpleNamespace(mhc_pre=mhc_pre, mhc_post=mhc_post)


def like_transformer_engine() -> Any:
    """TransformerEngine 2.20's signatures: streams [s, b, C, n], phi's columns in that order, bias [1, K]."""

    def mix(x: Any, phi: Any, alpha: Any, beta: Any) -> Any:
        assert x.is_contiguous()
        assert beta.shape == (1, 24)
        streams = x.mT
        phi = phi.unflatten(-1, x.shape[-2:]).mT.flatten(-2)
        pre, post, res = gates(streams, phi, alpha, beta.flatten())
        return ops.aggregate(streams, pre), post, res

    def combine(f: Any, bias: Any, h_post: Any, x: Any, h_res: Any, n: int) -> Any:
        assert x.is_contiguous()
        assert n == 4
        return ops.expand_combine(f, bias, h_post, x.mT, h_res).mT.contiguous()

    return SimpleNamespace(mhc_generate_mix_and_aggregate=mix, mhc_fused_expand_combine=combine)


@pytest.mark.parametrize(
    ("provider", "peer"),
    [("liger", like_liger), ("tile_kernels", like_tile_kernels), ("transformer_engine", like_transformer_engine)],
)
def test_adapters(provider: str, peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries are given what they want and compute the chain: stand-ins with their signatures and layouts."""
    monkeypatch.setattr(providers, "_peer", lambda name: peer())
    work = workload(replace(TINY, dtype="bfloat16"), CPU)
    judge = runner.Judge(work)
    with runner.laid_out(work, provider):
        call = providers.PROVIDERS[provider](work, None)
        judge.check_step(work.step(call))
        judge.check({"output": work.forward(call)})


def test_a_peer_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libtransformer_engine.so: no such file")

    monkeypatch.setattr("importlib.import_module", broken)
    (result,) = run(TINY, "transformer_engine")
    assert result["status"] == "unavailable"
    assert result["reason"] == "cannot be imported: OSError: libtransformer_engine.so: no such file"


def test_what_exceeds_the_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(work: Any, mode: str | None) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99.00 GiB.")

    monkeypatch.setitem(providers.PROVIDERS, "large", large)
    (result,) = run(TINY, "large")
    assert result["status"] == "skipped"
    assert result["reason"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 99.00 GiB."


@pytest.mark.slow
def test_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """What took long is expected to take as long again, in a case of another name as well; what is unknown is tried."""
    cases = {"main": [replace(TINY, modes=("forward",))], "tokens": [replace(TINY, tokens=7, modes=("forward",))]}
    slow = bench(budget=runner.Budget(20_000.0, {("long", "mhc-ops"): 50_000.0}))
    assert not runner.run_plan(cases, ["eager", "mhc-ops"], slow)
    assert [r["provider"] for r in slow.results] == ["eager", "eager"]
    assert "mhc-ops: left out" in capsys.readouterr().out
    spent = bench(budget=runner.Budget(0.0))
    assert not runner.run_plan(cases, ["eager"], spent)
    assert spent.results == []
    assert "2 of 2 cases are left out" in capsys.readouterr().out
    assert runner.run_plan(cases, ["eager"], slow)
    assert len(slow.results) == 2


def test_no_time_for_a_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left for another run; what fails there is a failure."""

    def late(*arguments: Any) -> Any:
        raise OutOfTime("no first step in the 3 s that were left")

    monkeypatch.setattr(runner, "first_step", late)
    assert run(replace(TINY, modes=FIRST), "eager") == []


@pytest.mark.thorough
def test_processes() -> None:
    """What one prints comes back, what it complains of as well, and none is left when time is up."""
    with pytest.raises(RuntimeError, match=r"no-such-thing in a fresh process: (.|\n)*unrecognized arguments"):
        in_process("no-such-thing", "{}", 60.0)
    with pytest.raises(OutOfTime, match="first-step did not end in the 0 s"):
        in_process("first-step", runner.request(TINY, "eager", CPU), 0.1)
    assert "NVIDIA H200" in in_process("table", "results/h200.json", 60.0)


def test_cold_and_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the same caches, which are empty before the first."""
    seen = []

    def process(command: str, request: str, limit: float) -> str:
        folder = Path(os.environ["TRITON_CACHE_DIR"])
        seen.append((folder, folder.exists()))
        folder.mkdir(exist_ok=True)
        return f'a warning\n{{"seconds": {4.0 / len(seen)}}}\n'

    monkeypatch.setattr(measure, "in_process", process)
    assert measure.first_step(replace(TINY, modes=FIRST), "mhc", CPU) == {"cold": 4.0, "warm": 2.0}
    assert [there for _, there in seen] == [False, True]
    assert len({folder for folder, _ in seen}) == 1


def test_a_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["first-step", runner.request(replace(TINY, modes=FIRST), "eager", CPU)]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["seconds"] < 60


@pytest.mark.slow
def test_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process compiled has no time of a first call; what failed or had no time has."""
    asked = []

    def process(command: str, request: str, limit: float, **environment: str) -> str:
        asked.append(json.loads(request)["case"]["tokens"])
        if asked[-1] > 6:
            raise OutOfTime if asked[-1] == 8 else RuntimeError
        return ""

    monkeypatch.setattr(runner, "in_process", process)
    monkeypatch.setitem(providers.PROVIDERS, "inductor", providers.eager)
    this = bench()
    cases = [replace(TINY, tokens=tokens) for tokens in (6, 7, 8)]
    this.prepare([(case, ["eager", "inductor"]) for case in cases] + [(TINY, ["eager"])], 1)
    assert asked == [6, 7, 8]
    for case in cases:
        this.run(case, ["inductor"])
    assert ["first_call_seconds" in result for result in this.results] == [False, True, True]


def test_compiling_runs_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(work: Any, mode: str | None) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_grad_enabled())
            return work.module(x)  # type: ignore[no-any-return]

        return call

    monkeypatch.setitem(providers.PROVIDERS, "inductor", watched)
    assert command.main(["compile", runner.request(TINY, "inductor", CPU)]) == 0
    assert seen == [True, False]


def test_bytes_of_eager_operators() -> None:
    x, row = torch.ones(16, 8), torch.ones(8)

    def program() -> torch.Tensor:
        y = (2 * x).view(16, 8).t()  # 512 read, 512 written; views move nothing
        y = y.reshape(16, 8)  # a copy: 512 read, 512 written
        return y.mul_(row.expand(16, 8))  # y read and written; the row is there once

    assert traffic.of_eager(program) == 512 * 2 + 512 * 2 + 512 * 2 + 32


@pytest.mark.usefixtures("fresh_dynamo")
def test_bytes_by_inductor() -> None:
    """One kernel that reads x once and writes one result; nothing compiled, nothing counted."""
    call = torch.compile(lambda x: (x.sin() + 1).cos())
    with traffic.of_inductor() as counted:
        call(torch.ones(1000))
    assert counted == [8000]
    with traffic.of_inductor() as counted:
        call(torch.ones(1000))
    assert counted == []


def test_what_is_too_far() -> None:
    eager = {"a": 1e-3, "b": 1e-5, "c": 2e-3}
    assert not complaints({"a": 3.9e-3, "b": 3.9e-3, "c": 7.9e-3}, eager, torch.float32)
    assert len(complaints({"a": 4.1e-3, "b": float("nan"), "c": 8.1e-3}, eager, torch.float32)) == 3


def test_errors_are_relative() -> None:
    reference = {"x": torch.full((FEW,), 2.0), "a.scale": torch.tensor([3.0]), "b.scale": torch.tensor([4.0])}
    values = {name: value.clone() for name, value in reference.items()}
    assert errors(values, reference) == {"x": 0.0, "*.scale": 0.0}
    values["x"] *= 1.5
    values["b.scale"] += 1.0
    assert errors(values, reference) == {"x": pytest.approx(0.5), "*.scale": pytest.approx(0.2)}
    del values["x"]
    assert errors(values, reference)["x"] == float("inf")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "operator"), [("unnormed", "boundary"), *((name, "shifted_boundary") for name in SHIFTED)]
)
def test_chains_of_other_orders(name: str, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured with the operators that they have."""
    monkeypatch.setattr(runner, "release", lambda: None)  # which forgets what was compiled
    (result,) = run(replace(TINY, name=name, depth=3), "mhc")
    assert result["status"] == "ok", result
    assert f"2 x {operator}" in str(records.last())


def test_a_token_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights fill no cache here."""
    monkeypatch.setattr(cases, "WEIGHTS", 1)
    for result in (*run(replace(TINY, name="served"), "eager"), *run(replace(TINY, name="served-alone"), "eager")):
        assert result["status"] == "ok", result
        assert "forward_floor_ms" not in result


@pytest.mark.slow
def test_a_whole_process() -> None:
    (result,) = run(replace(TINY, name="sine", modes=PROCESS), "inductor")
    assert result["status"] == "ok", result
    assert result["process_seconds"]["cold"] > result["process_seconds"]["warm"] > 1


def test_plans() -> None:
    """Every size that results are published for is in the plan, what matters most first."""
    full = plan(torch.device("cuda"), quick=False, recompute=True)
    assert list(full) == list(PARTS)
    chains = [case for part in ("main", "tokens", "width", "streams") for case in full[part]]
    for provider in ("inductor", "mhc"):
        mine = [case for case in chains if not case.providers or provider in case.providers]
        assert {1, 8, 64, 512, 4096, 8192, 32768} <= {case.tokens for case in mine}
        assert {1280, 2560, 4096, 7168} <= {case.width for case in mine}
        assert {2, 4, 8, 16} == {case.streams for case in mine}
    assert {case.tokens for case in full["decode"]} == {1, 8, 64}
    for quick in (full, plan(torch.device("cuda"), quick=True, recompute=False), plan(CPU, quick=True, recompute=True)):
        assert [part for part in PARTS if part in quick] == list(quick)
        for case in (case for listed in quick.values() for case in listed):
            assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case
            assert set(case.providers) <= providers.PROVIDERS.keys()
            assert case.modes in (FIRST, PROCESS) or not {"first", "process"} & {*case.modes}


def test_sample() -> None:
    assert Sample.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Sample(3.5, 2.0, 5.0, 6)
    assert Sample.of([7.0]) == Sample(7.0, 7.0, 7.0, 1)


def test_a_case_that_cannot_be_made_does_not_stop_the_others() -> None:
    (result,) = run(replace(TINY, dtype="int8"), "eager")
    assert result["status"] == "failed"
    assert result["reason"].startswith("reference: ")
