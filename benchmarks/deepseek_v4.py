"""DeepSeek-V4 models of transformers with random weights, small and at the real width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HashRouter,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)


@dataclass(frozen=True)
class Setup:
    """One size: the model's configuration, the data and the precision."""

    model: dict[str, Any]
    dtype: torch.dtype
    batch: int
    tokens: int
    check_batches: int
    experts: str
    stack_depth: int


# A discrete choice cannot turn a rounding error into a different computation. The indexer keeps every compressed entry
# (index_topk = tokens / 4). Experts are picked by token id (hash_moe), or in float32 by a router whose smallest margin
# `benchmarks.whole_model` checks.
SETUPS = {
    "tiny": Setup(
        model={
            "vocab_size": 512,
            "hidden_size": 256,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 2,
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            "mlp_layer_types": ["hash_moe", "moe"],
            "num_attention_heads": 4,
            "head_dim": 64,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": 64,
            "o_groups": 2,
            "o_lora_rank": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "index_n_heads": 4,
            "index_head_dim": 32,
            "index_topk": 16,
            "max_position_embeddings": 1024,
        },
        dtype=torch.float32,
        batch=2,
        tokens=64,
        check_batches=6,
        experts="batched_mm",
        stack_depth=2,
    ),
    # The sizes of DeepSeek-V4-Flash, but for the number of layers, of experts and of words, so that it,
    # its float64 copy and the gradients of both fit one GPU of 80 GB.
    "flash": Setup(
        model={
            "vocab_size": 32768,
            "num_hidden_layers": 4,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe"] * 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "index_topk": 512,
            "max_position_embeddings": 4096,
        },
        dtype=torch.bfloat16,
        batch=1,
        tokens=2048,
        check_batches=2,
        experts="grouped_mm",
        stack_depth=2,
    ),
}


def build(setup: Setup, device: torch.device, seed: int) -> DeepseekV4ForCausalLM:
    """The model of `setup` with random weights, in training mode, on `device`."""
    torch.manual_seed(seed)
    config = DeepseekV4Config(**setup.model, use_cache=False)
    make: Any = DeepseekV4ForCausalLM._from_config
    with device:
        model: DeepseekV4ForCausalLM = make(
            config, dtype=setup.dtype, attn_implementation="eager", experts_implementation=setup.experts
        )
        randomise(model)
    model.train()
    return model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give every part that a fresh model leaves at zero or one a value that differs from its neighbours'.

    The hyper-connection parameters are float32, as DeepSeek-V4 checkpoints hold them. Their logits get a
    standard deviation of about 1, so that no gate is saturated and the residual mixing is far from uniform.
    """
    for module in model.modules():
        if isinstance(module, (DeepseekV4HyperConnection, DeepseekV4HyperHead)):
            module.float()
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("fn"):
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                elif name.endswith("scale"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.5)
        elif isinstance(module, DeepseekV4HashRouter):
            # Distinct experts for each word, as in a checkpoint; a fresh model sends every word to expert 0.
            words = module.tid2eid.shape[0]
            scores = torch.rand(words, module.num_experts, device=module.tid2eid.device)
            module.tid2eid.copy_(scores.topk(module.top_k, dim=-1).indices)


class ResidualLayer(GradientCheckpointingLayer):
    """A decoder layer with residual connections in place of hyper-connections: from [batch, tokens, C] to the same."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, x: Tensor, input_ids: Tensor, **about: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **about)[0]
        f: Tensor = self.mlp(self.post_attention_layernorm(x), input_ids=input_ids)
        return x + f
