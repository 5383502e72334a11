"""The hyper-connections form: streams folded into the batch, one projection shared by all streams, mixing first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, reduce, repeat
from torch import nn

from tests.zoo.common import STREAMS, WIDTH, CheapLayer, Tensors, random_parameter, stream_embedding

# einops remembers the types that it has met, and Dynamo compiles anew when there is another.
for _met in (torch.ones(1), nn.Parameter(torch.ones(1))):
    rearrange(_met, "a -> a")


def l1_sinkhorn(logits: torch.Tensor, iterations: int) -> torch.Tensor:
    m = (logits - logits.amax(dim=-2, keepdim=True).detach()).exp()
    for _ in range(iterations):
        m = F.normalize(m, p=1, dim=-2)
        m = F.normalize(m, p=1, dim=-1)
    return m


def log_softmax_sinkhorn(logits: torch.Tensor, iterations: int) -> torch.Tensor:
    for _ in range(iterations):
        logits = F.log_softmax(logits, dim=-2)
        logits = F.log_softmax(logits, dim=-1)
    return logits.exp()


class LucidrainsSublayer(nn.Module):
    def __init__(self, n: int, width: int, iterations: int, log_domain: bool) -> None:
        super().__init__()
        self.n, self.iterations, self.log_domain = n, iterations, log_domain
        self.gamma = random_parameter(width, std=0.2)
        self.dynamic_alpha = random_parameter(width, n + 1, std=width**-0.5)
        self.static_alpha = random_parameter(n, n + 1, std=0.5)
        self.pre_scale = random_parameter(1, mean=1.0, std=0.2)
        self.residual_scale = random_parameter(1, mean=1.0, std=0.2)
        self.dynamic_beta = random_parameter(width, std=width**-0.5)
        self.static_beta = random_parameter(n, std=0.5)
        self.beta_scale = random_parameter(mean=1.0, std=0.2)
        self.layer = CheapLayer(width)

    def forward(self, folded: torch.Tensor) -> torch.Tensor:
        n = self.n
        x = rearrange(folded, "(b n) s d -> b s n d", n=n)
        normed = F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * (self.gamma + 1)
        scale = torch.cat((self.pre_scale, repeat(self.residual_scale, "1 -> n", n=n)))
        alpha = (normed @ self.dynamic_alpha) * scale + self.static_alpha
        pre, res = alpha[..., :1].sigmoid(), alpha[..., 1:]
        res = log_softmax_sinkhorn(res, self.iterations) if self.log_domain else l1_sinkhorn(res, self.iterations)
        beta = ((normed @ self.dynamic_beta) * self.beta_scale + self.static_beta).sigmoid() * 2
        both = einsum(torch.cat((pre, res), dim=-1), x, "b s i o, b s i d -> b s o d")
        layer_input, mixed = both[..., 0, :], both[..., 1:, :]
        f = self.layer(layer_input)
        x = einsum(f, beta, "b s d, b s n -> b s n d") + mixed
        return rearrange(x, "b s n d -> (b n) s d")


class Lucidrains(nn.Module):
    """Token embeddings [b, s, C] -> [b, s, C]."""

    def __init__(
        self,
        streams: int = STREAMS,
        width: int = WIDTH,
        layers: int = 2,
        iterations: int = 20,
        log_domain: bool = False,
    ) -> None:
        super().__init__()
        self.n = streams
        self.embedding = stream_embedding(streams, width)
        self.sublayers = nn.ModuleList(
            LucidrainsSublayer(streams, width, iterations, log_domain) for _ in range(layers)
        )

    def forward(self, embeddings: torch.Tensor) -> Tensors:
        x = repeat(embeddings, "b s d -> (b n) s d", n=self.n)
        x = x + repeat(self.embedding, "n d -> (b n) 1 d", b=len(embeddings))
        for sublayer in self.sublayers:
            x = sublayer(x)
        return reduce(x, "(b n) s d -> b s d", "sum", n=self.n), x


class HyperConnectionsPackage(nn.Module):
    """The same through the `hyper-connections` package itself, with its zero-initialised parameters made random."""

    def __init__(
        self,
        streams: int = STREAMS,
        width: int = WIDTH,
        layers: int = 2,
        iterations: int = 20,
        log_domain: bool = False,
    ) -> None:
        super().__init__()
        from hyper_connections import mc_get_init_and_expand_reduce_stream_functions

        connect, self.expand, self.reduce = mc_get_init_and_expand_reduce_stream_functions(
            streams, dim=width, add_stream_embed=True, sinkhorn_iters=iterations, log_domain_sinkhorn=log_domain
        )
        self.sublayers = nn.ModuleList(connect(branch=CheapLayer(width), layer_index=index) for index in range(layers))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if ".branch." in name:
                    continue
                if "scale" in name:
                    parameter.normal_(1.0, 0.2)
                elif "dynamic" in name:
                    parameter.normal_(0.0, width**-0.5)
                else:
                    parameter.normal_(0.0, 0.5)

    def forward(self, embeddings: torch.Tensor) -> Tensors:
        x = self.expand(embeddings)
        for sublayer in self.sublayers:
            x = sublayer(x)
        return self.reduce(x), x
