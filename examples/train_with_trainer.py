"""Train DeepSeek-V4 with transformers' Trainer; on several GPUs with FSDP2, and hyper-connections in float32.

    python examples/train_with_trainer.py
    torchrun --nproc-per-node 2 examples/train_with_trainer.py

Look at `make_trainer`: layers are compiled one by one, before accelerate shards them. On CPUs accelerate has no FSDP.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, Trainer, TrainingArguments

import mhc_compile
from mhc_compile.distributed import replicate

# The modules that hold phi, scale and bias.
HYPER_CONNECTIONS = ("attn_hc", "ffn_hc", "hc_head")


def make_model() -> DeepseekV4ForCausalLM:
    """A small one; its vocabulary are bytes."""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=256,
        num_hidden_layers=2,
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
    )
    model = DeepseekV4ForCausalLM(config)
    if not torch.cuda.is_available():
        model.set_experts_implementation("batched_mm")  # Dynamo cannot trace the default on a CPU
    return model


def make_trainer(out: str, processes: int, *, sharded: bool, steps: int = 20, rows: int = 8) -> Trainer:
    """A trainer of so many rows a step, of all processes."""
    on_gpus = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=out,
        use_cpu=not on_gpus,
        ddp_backend="gloo" if processes > 1 and not on_gpus else None,
        per_device_train_batch_size=rows // processes,
        max_steps=steps,
        learning_rate=1e-3,
        bf16=on_gpus,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fsdp=sharded,
        fsdp_config={"transformer_layer_cls_to_wrap": ["DeepseekV4DecoderLayer"]} if sharded else None,
    )
    model = make_model()
    for layer in model.model.layers:
        layer.compile(backend="mhc")
    if sharded:
        # After TrainingArguments, which begins the job, and before Trainer.
        os.environ["FSDP_IGNORED_MODULES"] = f".*({'|'.join(HYPER_CONNECTIONS)})"
        mesh = init_device_mesh(arguments.device.type, (processes,))
        replicate(model, mesh, lambda name, _: any(f"{module}." in name for module in HYPER_CONNECTIONS))
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    data = [{"input_ids": row, "labels": row} for row in text.unfold(0, 32, 16)]
    return Trainer(model=model, args=arguments, train_dataset=data)


def main() -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as out:
        trainer = make_trainer(out, processes, sharded=processes > 1 and torch.cuda.is_available())
        trainer.train()
    if trainer.is_world_process_zero():
        sys.stdout.write(f"{mhc_compile.report()}\n")


if __name__ == "__main__":
    main()
