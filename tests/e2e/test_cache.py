"""Compiled graphs are found again by a second process, and not after operators, passes, kernels or options changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from mhc_compile import backend

ROOT = Path(__file__).parents[2]

PROGRAM = textwrap.dedent(
    """
    import json, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    from torch._dynamo.utils import counters
    from mhc_compile import backend
    from mhc_compile.nn import Form, HyperConnection

    touched, options = json.loads(sys.argv[1])
    if touched:  # as if the file had another content
        backend._sources_hash.cache_clear()
        hashed = backend.compat.hash_files
        assert any(touched in file for file in backend._sources()), touched
        backend.compat.hash_files = lambda files: (hashed(files), touched)
    torch.manual_seed(0)
    model = HyperConnection(torch.nn.Tanh(), dim=8, form=Form.deepseek_v4(iterations=2))
    out = torch.compile(model, backend="mhc", options=options)(torch.randn(2, 3, 4, 8))
    out.sum().backward()
    print(json.dumps({
        "autograd": counters["aot_autograd"]["autograd_cache_hit"],
        "graph": counters["inductor"]["fxgraph_cache_hit"],
        "missed": counters["aot_autograd"]["autograd_cache_miss"],
        "bypassed": counters["aot_autograd"]["autograd_cache_bypass"] + counters["inductor"]["fxgraph_cache_bypass"],
        "out": out.sum().item(),
        "report": backend.last_report is not None,
    }))
    """
)


def _run(cache: Path, touched: str = "", options: dict[str, Any] | None = None) -> dict[str, Any]:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([touched, options or {}])],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_second_process_finds_the_compiled_graphs(tmp_path: Path) -> None:
    first = _run(tmp_path)
    assert first["missed"] == 1
    assert first["bypassed"] == 0
    second = _run(tmp_path)
    assert second["autograd"] == 1
    assert second["missed"] == 0
    assert second["out"] == first["out"]
    assert _run(tmp_path, touched="passes/recognise/gates.py")["missed"] == 1
    assert _run(tmp_path, options={"mhc.strict": True})["missed"] == 1


def test_the_identity_covers_every_source() -> None:
    package = Path(backend.__file__).parent
    seen = set(backend._sources())
    for folder in ("compat", "ops", "kernels", "passes"):
        assert {str(file) for file in (package / folder).rglob("*.py")} <= seen
    assert len(seen) > 30
