"""Reports of everything that was compiled, in this process and, beside Inductor's cache, for later ones."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import backend
from mhc_compile.passes.report import Report
from tests.zoo.near import Sublayer

ROOT = Path(__file__).parents[1]
SHAPE = (2, 3, 4, 6)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def _no_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the passes: what Inductor would make of a graph is of no interest here."""

    def passes_only(patches: dict[str, Any], gm: Any, inputs: Any) -> Any:
        for name in {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}:
            if isinstance(body := getattr(gm, name), torch.fx.GraphModule):
                patches["pre_grad_custom_pass"](body.graph)
        patches["pre_grad_custom_pass"](gm.graph)
        return gm.forward

    def compiler(mode: Any, options: Any, patches: dict[str, Any]) -> Any:
        return functools.partial(passes_only, patches)

    monkeypatch.setattr(backend.compat, "inductor_compiler", compiler)


def _operators() -> list[str]:
    return sorted(site.op for site in mhc_compile.report().rewritten)


BOTH = ["expand_combine", "generate_mix_and_aggregate"]


@pytest.mark.usefixtures("_no_lowering")
def test_graphs_add_up_until_dynamo_is_reset() -> None:
    first, second = Sublayer(4, 6, 3, 2), Sublayer(4, 6, 3, 2)
    second.__class__ = type("Other", (Sublayer,), {"forward": lambda self, x: self.body(x + 1.0)})
    torch.compile(first, backend="mhc")(torch.randn(SHAPE))
    assert _operators() == BOTH
    torch.compile(second, backend="mhc")(torch.randn(SHAPE))
    assert _operators() == sorted(BOTH * 2)
    assert mhc_compile.report().graphs == 2
    torch._dynamo.reset()
    assert mhc_compile.report().graphs == 0


@pytest.mark.usefixtures("_no_lowering")
def test_a_function_that_is_compiled_again_counts_once() -> None:
    compiled = torch.compile(Sublayer(4, 6, 3, 2), backend="mhc", dynamic=False)
    for length in (3, 5):
        compiled(torch.randn(2, length, 4, 6))
    assert _operators() == BOTH


@pytest.mark.usefixtures("_no_lowering")
def test_nested_graphs_belong_to_the_graph_around_them() -> None:
    inside, outside = Sublayer(4, 6, 3, 2), Sublayer(4, 6, 3, 2)
    torch.compile(lambda x: outside(checkpoint(inside, x, use_reentrant=False)), backend="mhc")(torch.randn(SHAPE))
    assert _operators() == sorted(BOTH * 2)
    assert backend.last_report is not None
    assert len(backend.last_report.rewritten) == 4


@pytest.mark.usefixtures("_no_lowering")
def test_graphs_on_both_sides_of_a_break_are_all_reported() -> None:
    first, second = Sublayer(4, 6, 3, 2), Sublayer(4, 6, 3, 2)

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    with torch.no_grad():
        torch.compile(broken, backend="mhc")(torch.randn(SHAPE))
    assert _operators() == sorted(BOTH * 2)


@pytest.fixture
def _alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("_no_lowering", "_alone_in_a_group")
def test_graphs_that_one_frame_is_cut_into_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DistributedDataParallel` has Dynamo cut a frame where a bucket of gradients is full, and may cut a sublayer."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    distributed = torch.nn.parallel.DistributedDataParallel(Sublayer(4, 6, 3, 2), bucket_cap_mb=0.002)
    torch.compile(distributed, backend="mhc")(torch.randn(SHAPE))
    assert mhc_compile.report().graphs > 1
    assert _operators() == ["aggregate", "expand_combine", "generate_mix"]


def test_no_graph_is_not_nothing_found() -> None:
    assert "no graph was looked at" in str(Report())
    assert "no hyper-connection code was found" in str(Report(graphs=1))


PROGRAM = textwrap.dedent(
    """
    import json, warnings
    warnings.simplefilter("ignore")
    import torch
    import mhc_compile
    import mhc_compile.backend
    from tests.zoo.near import Sublayer

    torch.manual_seed(0)
    with torch.no_grad():
        torch.compile(Sublayer(4, 6, 3, 2), backend="mhc")(torch.randn(2, 3, 4, 6))
    print(json.dumps(mhc_compile.report().graphs))
    """
)


def test_logs_traces_and_what_a_warm_cache_says(tmp_path: Path) -> None:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCH_LOGS": "+mhc_compile",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)

    def run(trace: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            env=environment | {"TORCH_TRACE": str(tmp_path / trace)},
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        traces = "".join(file.read_text() for file in (tmp_path / trace).iterdir())
        return json.loads(done.stdout.splitlines()[-1]), done.stderr, traces

    sentence = "2 of 2 hyper-connection sites rewritten"
    graphs, log, trace = run("cold")
    assert graphs == 1
    assert sentence in log
    assert sentence in trace
    assert '"name": "mhc_report"' in trace
    assert '"name": "mhc_rewritten_graph"' in trace
    assert "torch.ops.mhc.expand_combine" in trace
    graphs, log, _ = run("warm")
    stored = list((tmp_path / "cache" / "mhc").iterdir())
    if graphs:  # torch 2.11 runs the passes before it looks into its cache
        assert sentence in log
    else:
        assert sentence not in log
        assert "found in Inductor's cache: no report is made anew" in log
        assert str(stored[0]) in log
    assert len(stored) == 1
    assert sentence in stored[0].read_text()
