"""Compiled graphs are found again by a second process, and not after operators, passes, kernels or options changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mhc_compile import hooks

ROOT = Path(__file__).parents[2]

PROGRAM = textwrap.dedent(
    """
    import json, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    from torch._dynamo.utils import counters
    import mhc_compile
    from mhc_compile import backend, hooks
    from mhc_compile.nn import Form, HyperConnection

    def run(options):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = HyperConnection(torch.nn.Tanh(), dim=8, form=Form.deepseek_v4(iterations=2))
        out = torch.compile(model, backend="mhc", options=options)(torch.randn(2, 3, 4, 8))
        out.sum().backward()
        autograd, inductor = counters["aot_autograd"], counters["inductor"]
        print(json.dumps({
            "autograd": autograd["autograd_cache_hit"],
            "graph": inductor["fxgraph_cache_hit"],
            "missed": autograd["autograd_cache_miss"],
            "bypassed": autograd["autograd_cache_bypass"] + inductor["fxgraph_cache_bypass"],
            "out": out.sum().item(),
            "report": str(mhc_compile.report()),
        }))

    run({})
    if len(sys.argv) > 1:
        run({"mhc.strict": True})
        touched = sys.argv[1]  # as if the file had another content
        hooks._sources_hash.cache_clear()
        hashed = backend.compat.hash_files
        assert any(touched in file for file in hooks._sources()), touched
        backend.compat.hash_files = lambda files: (hashed(files), touched)
        run({})
    """
)


def _run(cache: Path, *touched: str) -> list[dict[str, Any]]:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *touched],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.thorough
def test_a_second_process_finds_the_compiled_graphs(tmp_path: Path) -> None:
    (first,) = _run(tmp_path)
    assert first["missed"] == 1
    assert first["bypassed"] == 0
    second, with_options, with_other_sources = _run(tmp_path, "passes/recognise/gates.py")
    assert second["autograd"] == 1
    assert second["missed"] == 0
    assert second["out"] == first["out"]
    for other in (with_options, with_other_sources):
        assert (other["missed"], other["autograd"]) == (1, 0)


def test_the_identity_covers_every_source() -> None:
    package = Path(hooks.__file__).parent
    seen = set(hooks._sources())
    for folder in ("compat", "ops", "kernels", "passes"):
        assert {str(file) for file in (package / folder).rglob("*.py")} <= seen
    assert len(seen) > 30
