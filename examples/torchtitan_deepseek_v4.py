"""torchtitan's DeepSeek-V4, each block compiled by mhc. Start it as torchtitan's other configs:

    export PYTHONPATH=examples
    torchrun --nproc-per-node 4 -m torchtitan.train --module torchtitan_deepseek_v4 --config debugmodel

Each function here is a config of torchtitan with another backend. torchtitan passes its name to `torch.compile`.

The names were compared with torchtitan's main branch after release 0.3.0, at commits 058df672 (configs) and f204eb63
(`CompileConfig`). Release 0.3.0 has no DeepSeek-V4. This file was not run with it: it needs GPUs.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torchtitan.config import CompileConfig
from torchtitan.models.deepseek_v4 import config_registry


def _compiled(config: Any) -> Any:
    # Releases up to 0.3.0 also want to be told that they compile at all.
    enable = {"enable": True} if "enable" in {field.name for field in fields(CompileConfig)} else {}
    config.compile = CompileConfig(backend="mhc", components=["model"], **enable)
    return config


def debugmodel() -> Any:
    return _compiled(config_registry.deepseek_v4_debugmodel())


def flash() -> Any:
    return _compiled(config_registry.deepseek_v4_flash())


def pro() -> Any:
    return _compiled(config_registry.deepseek_v4_pro())
