"""Compile an unmodified DeepSeek-V4 with backend="mhc", time it, and compare it with float64.

    python examples/compile_deepseek_v4.py

`DeepseekV4ForCausalLM` is used as the transformers package ships it, with random weights. Look at the first line of the
report, at the two times, and at the table of errors. On a CPU, hyper-connections are a small part of a step; the
documentation has measurements on GPUs. The exit status is 1 if a site was left, or if `verify` fails.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import mhc_compile

CONFIG = DeepseekV4Config(
    vocab_size=512,
    num_hidden_layers=2,
    layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    # Experts by token: a rounding error cannot send a token to another expert, so that errors can be compared.
    mlp_layer_types=["hash_moe", "hash_moe"],
    hidden_size=256,
    moe_intermediate_size=128,
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_attention_heads=4,
    head_dim=64,
    q_lora_rank=64,
    o_lora_rank=64,
    o_groups=2,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=16,  # every compressed entry of 64 tokens, for the same reason
    sliding_window=32,
    max_position_embeddings=1024,
    use_cache=False,
)


def step(model: DeepseekV4ForCausalLM, ids: torch.Tensor) -> float:
    """The seconds of a training step without an optimizer."""
    begin = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    model.zero_grad()
    return time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DeepseekV4ForCausalLM(CONFIG).to(device)
    model.set_experts_implementation("batched_mm")  # on a CPU, grouped experts break the graph
    ids = torch.randint(0, CONFIG.vocab_size, (2, 64), device=device)

    step(model, ids)
    eager = statistics.median(step(model, ids) for _ in range(5))

    # Strict: an error if a site is left, or if Dynamo does not compile a function.
    model.compile(backend="mhc", options={"mhc.strict": True})
    print("compiling; this may take a minute or two ...", flush=True)
    first = step(model, ids)
    compiled = statistics.median(step(model, ids) for _ in range(5))
    print(mhc_compile.report())
    print(
        f"a training step: eager {1e3 * eager:.1f} ms, compiled {1e3 * compiled:.1f} ms; the first took {first:.0f} s"
    )

    # Compiles again. Compares outputs and all gradients with float64, and raises if mhc is less accurate than eager.
    mhc_compile.verify(model, input_ids=ids, labels=ids, inductor=False)


if __name__ == "__main__":
    main()
