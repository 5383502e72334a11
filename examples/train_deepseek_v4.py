"""Train transformers' DeepSeek-V4 for a few steps, then generate text with its KV cache, both compiled.

    python examples/train_deepseek_v4.py

The model learns to count. Look at the generated numbers, and at the report: `generate` runs the compiled forward, first
with all tokens of the prompt, then with one new token a step.
"""

from __future__ import annotations

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import mhc_compile

CONFIG = DeepseekV4Config(
    vocab_size=32,
    num_hidden_layers=1,
    layer_types=["sliding_attention"],
    mlp_layer_types=["hash_moe"],
    hidden_size=64,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    num_attention_heads=4,
    head_dim=32,
    q_lora_rank=32,
    o_lora_rank=16,
    o_groups=2,
    index_n_heads=2,
    index_head_dim=16,
    sliding_window=16,
    max_position_embeddings=128,
)


def main() -> None:
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(CONFIG)
    model.set_experts_implementation("batched_mm")  # on a CPU, grouped experts break the graph
    model.compile(backend="mhc")  # in place: `generate` of torch.compile(model) would run eagerly

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        starts = torch.randint(0, 32, (8, 1))
        ids = (starts + torch.arange(16)) % 32
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss before {losses[0]:.3f}, after {losses[-1]:.3f}")

    prompt = torch.arange(5, 11).unsqueeze(0)
    numbers = model.eval().generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(f"generated {numbers[0].tolist()}")
    print(mhc_compile.report())


if __name__ == "__main__":
    main()
