"""Move the hyper-connections of a checkpoint between libraries: from DeepSeek-V4 to `mhc_compile.nn`, and to Liger.

    python examples/move_a_checkpoint.py

Look at the two errors: one output is compared in the modules of both libraries, and the way back gives the same bits.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from mhc_compile.checkpoints import from_deepseek_v4, to_deepseek_v4, to_liger
from mhc_compile.nn import Form, HyperConnection

WIDTH = 64


def main() -> None:
    torch.manual_seed(0)
    config = DeepseekV4Config(hidden_size=WIDTH)
    theirs = DeepseekV4HyperConnection(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    # In a checkpoint, names of parameters begin with the place of their module.
    prefix = "model.layers.0.attn_hc."
    checkpoint = {prefix + name: value for name, value in theirs.state_dict().items()}

    # The form says which equations the numbers belong to. It is not part of a checkpoint: take it from the config.
    form = Form.deepseek_v4(iterations=config.hc_sinkhorn_iters, eps=config.hc_eps, norm_eps=config.rms_norm_eps)
    ours = HyperConnection(nn.Identity(), dim=WIDTH, streams=config.hc_mult, form=form)
    ours.load_state_dict(from_deepseek_v4(checkpoint, prefix), strict=False)  # not strict: the layer has its own

    streams = torch.randn(2, 8, config.hc_mult, WIDTH)
    with torch.no_grad():
        post, comb, read = theirs(streams)
        expected = post.unsqueeze(-1) * read.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
        print(f"largest difference between the modules: {(ours(streams) - expected).abs().max():.1e}")

    back = to_deepseek_v4(ours.state_dict(), form, prefix)
    equal = all(torch.equal(back[name], value) for name, value in checkpoint.items())
    print(f"the way back gives the same bits: {equal}")

    # Liger applies h_res the other way. No order of these parameters does the same there, so the function refuses.
    try:
        to_liger(ours.state_dict(), form)
    except ValueError as error:
        print(f"to Liger: {str(error).rpartition(', and ')[2]}")


if __name__ == "__main__":
    main()
