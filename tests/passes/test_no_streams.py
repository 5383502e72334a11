"""Models without hyper-connections that weigh, mix or add small sets of vectors: nothing is rewritten or told.

Experts, heads, keys and the nodes of a graph look like streams to whoever sees shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile import passes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

B, S, N, C = 2, 5, 4, 8
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {}


class _Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.one, self.two = nn.Linear(C, C), nn.Linear(C, C)
        self.router, self.wide = nn.Linear(C, N), nn.Linear(N * C, N)
        self.gate = nn.Parameter(torch.randn(C))
        self.nodes = nn.Parameter(torch.randn(N))
        self.matrix = nn.Parameter(torch.randn(N, N))
        self.many, self.others = (nn.Linear(3 * C, 3 * C, bias=False) for _ in range(2))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def _model(*shapes: tuple[int, ...]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a model, a function of a module with a few layers and of inputs of these shapes."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        MODELS[function.__name__] = lambda: (_Model(function), tuple(torch.randn(shape) for shape in shapes))
        return function

    return register


TOKENS = (B, S, C)
SETS = (B, S, N, C)


@_model(TOKENS, SETS)
def combine_of_experts(m: Any, x: Tensor, experts: Tensor) -> Tensor:
    weights = m.router(x).softmax(-1)
    return x + (weights.unsqueeze(-1) * torch.tanh(experts)).sum(-2)


@_model(TOKENS, SETS)
def combine_of_the_top_experts(m: Any, x: Tensor, experts: Tensor) -> Tensor:
    weights, chosen = m.router(x).softmax(-1).topk(2)
    picked = experts.gather(-2, chosen.unsqueeze(-1).expand(B, S, 2, C))
    return x + torch.einsum("bsk,bskc->bsc", weights / weights.sum(-1, keepdim=True), picked)


@_model((B, 2, 1, C), (B, 2, 16, C), (B, 2, 16, C))
def decode_attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * C**-0.5).softmax(-1) @ v


@_model((B, 2, 30, C), (B, 2, 30, C), (B, 2, 30, C))
def attention_over_few_keys(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.one((q @ k.mT * C**-0.5).softmax(-1) @ v) + q


@_model((B, S, C))
def attention_with_a_residual(m: Any, x: Tensor) -> Tensor:
    scores = (m.one(x) @ m.two(x).mT).softmax(-1)
    return x + scores @ x


@_model((B, S, C))
def attention_beside_a_global_context(m: Any, x: Tensor) -> Tensor:
    context = torch.relu(m.two(x.mean(1)))
    return context.unsqueeze(1) + (m.one(x) @ x.mT).softmax(-1) @ x


@_model((B, N, S, S), (B, N, S, C))
def talking_heads(m: Any, scores: Tensor, v: Tensor) -> Tensor:
    mixed = torch.einsum("hg,bhij->bgij", m.matrix, scores).softmax(-1)
    return torch.einsum("hg,bhij->bgij", m.matrix, mixed) @ v


@_model((B, N, N), (B, N, C), (B, N, 1))
def graph_convolution_with_a_rank_one_term(m: Any, adjacency: Tensor, x: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(adjacency, x) + b * x.mean(1, keepdim=True)


@_model((B, N, N), (B, N, C))
def graph_convolution(m: Any, adjacency: Tensor, x: Tensor) -> Tensor:
    return torch.relu(m.one(adjacency.softmax(-1) @ x)) + m.two(x)


@_model(TOKENS)
def layer_scale(m: Any, x: Tensor) -> Tensor:
    return x + m.gate * torch.relu(m.one(x))


@_model(TOKENS, (B, C))
def adaptive_layer_norm(m: Any, x: Tensor, condition: Tensor) -> Tensor:
    shift, gate = m.one(condition).unsqueeze(1), m.two(condition).unsqueeze(1)
    return x + gate * torch.relu(m.one(F.layer_norm(x, (C,)) * (1 + gate) + shift))


@_model((B, C, 6, 6))
def squeeze_and_excitation(m: Any, x: Tensor) -> Tensor:
    scale = torch.sigmoid(m.two(torch.relu(m.one(x.mean((2, 3))))))
    return x * scale[:, :, None, None] + x


@_model((B, N, C, 6, 6))
def selective_kernels(m: Any, x: Tensor) -> Tensor:
    weights = m.one(x.sum(1).mean((2, 3))).unsqueeze(1).expand(B, N, C).softmax(1)
    return (weights[..., None, None] * x).sum(1)


@_model((B, S, C))
def global_context(m: Any, x: Tensor) -> Tensor:
    """A pooled context that is added to each of a few positions."""
    weights = m.one(x)[..., :1].softmax(1)
    context = torch.einsum("bsk,bsc->bc", weights, x)
    return x + torch.relu(m.two(context)).unsqueeze(1)


@_model(SETS)
def ensemble(m: Any, outputs: Tensor) -> Tensor:
    return torch.einsum("n,bsnc->bsc", m.nodes.softmax(0), outputs.softmax(-1))


@_model(SETS)
def attention_pooling(m: Any, x: Tensor) -> Tensor:
    weights = (torch.tanh(m.one(x)) @ m.gate).softmax(-1)
    return m.two(torch.einsum("bsn,bsnc->bsc", weights, x))


@_model((B, N, C))
def mixer(m: Any, x: Tensor) -> Tensor:
    y = x + torch.einsum("ij,bjc->bic", m.matrix, F.layer_norm(x, (C,)))
    return y + torch.relu(m.one(y))


@_model(TOKENS, TOKENS)
def gated_recurrence(m: Any, x: Tensor, h: Tensor) -> Tensor:
    z = torch.sigmoid(m.one(x) + m.two(h))
    return (1 - z) * h + z * torch.tanh(m.one(x))


@_model(TOKENS)
def low_rank_adapter(m: Any, x: Tensor) -> Tensor:
    return m.one(x) + 2.0 * (m.router(x) @ m.matrix @ m.router.weight)


@_model((B, N, C), (B, N, C))
def linear_attention(m: Any, k: Tensor, v: Tensor) -> Tensor:
    state = torch.einsum("bnc,bnd->bcd", k.exp(), v)
    return torch.einsum("bnc,bcd->bnd", m.one(v), state) / k.exp().sum(1, keepdim=True)


@_model((B, N, C))
def routing_by_agreement(m: Any, votes: Tensor) -> Tensor:
    logits = votes.new_zeros(B, N)
    for _ in range(2):
        capsule = torch.einsum("bn,bnc->bc", logits.softmax(-1), votes)
        capsule = capsule * torch.rsqrt(capsule.square().sum(-1, keepdim=True) + 1.0)
        logits = logits + torch.einsum("bnc,bc->bn", votes, capsule)
    return capsule


@_model((B, S, 2, C))
def rotation_of_pairs(m: Any, x: Tensor) -> Tensor:
    angle = m.one(x[..., 0, :])[..., :1]
    matrix = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).view(B, S, 2, 2)
    return matrix @ x


@_model((B, S, 3), (B, 3, C))
def interpolation_between_neighbours(m: Any, weights: Tensor, neighbours: Tensor) -> Tensor:
    return m.one(torch.bmm(weights.softmax(-1), neighbours)) + m.gate


@_model(TOKENS)
def list_of_experts(m: Any, x: Tensor) -> Tensor:
    weights = m.router(x).softmax(-1)
    experts = [torch.tanh(layer(x)) for layer in (m.one, m.two, m.one, m.two)]
    return x + sum(weights[..., i : i + 1] * f for i, f in enumerate(experts))


@_model(TOKENS)
def list_of_everything_before(m: Any, x: Tensor) -> Tensor:
    """A DenseNet, whose layers read weighted sums of all features there are."""
    features = [x]
    for layer in (m.one, m.two, m.one):
        features.append(torch.relu(layer(sum(m.nodes[i] * f for i, f in enumerate(features)))))
    return torch.cat(features, -1)


@_model((B, 12, C))
def list_of_scales(m: Any, x: Tensor) -> Tensor:
    scales = [F.avg_pool1d(x.mT, k).mT for k in (1, 2, 3, 4)]
    wide = [F.interpolate(s.mT, size=12).mT for s in scales]
    weights = m.nodes.softmax(0)
    return m.two(torch.relu(m.one(sum(weights[i] * s for i, s in enumerate(wide)))))


@_model(TOKENS, TOKENS)
def list_of_tasks(m: Any, x: Tensor, y: Tensor) -> Any:
    """Cross-stitch units: features of tasks are mixed, and each goes through a layer of its own."""
    features = [torch.relu(m.one(x)), torch.relu(m.two(y))]
    mixed = [sum(m.matrix[i, j] * f for j, f in enumerate(features)) for i in range(2)]
    return [m.one(mixed[0]), m.two(mixed[1])]


@_model(TOKENS)
def list_of_heads_with_gates(m: Any, x: Tensor) -> Any:
    """One residual for each of several tasks."""
    f = torch.relu(m.one(x))
    return [x + m.nodes[i] * f for i in range(N)]


@_model((B, N, C))
def mixer_with_a_pooled_token(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("ij,bjc->bic", m.matrix, x) + m.two(torch.relu(m.one(x.mean(1)))).unsqueeze(1)


@_model((B, N, C), (B, 1, C), (B, N, C))
def attention_with_one_more_key(m: Any, v: Tensor, more: Tensor, q: Tensor) -> Tensor:
    scores = torch.cat((m.one(q) @ v.mT, m.router(q)[..., :1]), -1).softmax(-1)
    return scores @ torch.cat((v, more), -2)


@_model((B, N, C))
def token_of_a_class(m: Any, x: Tensor) -> Tensor:
    """A weighted sum of all positions is added to the first."""
    weights = m.wide(x.flatten(1)).softmax(-1)
    context = torch.relu(m.two(torch.einsum("bn,bnc->bc", weights, x)))
    return torch.cat((x[:, :1] + context.unsqueeze(1), x[:, 1:]), 1)


@_model((B, S, 2 * C))
def residual_of_half_the_channels(m: Any, x: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((one + torch.relu(m.one(two)), two), -1)


@_model(SETS)
def lone_mix(m: Any, x: Tensor) -> Tensor:
    return m.matrix.softmax(-1) @ x


@_model((B, N, C))
def context_for_all_positions(m: Any, x: Tensor) -> Tensor:
    weights = m.wide(x.flatten(1)).softmax(-1)
    return x + torch.relu(m.two(torch.einsum("bn,bnc->bc", weights, x))).unsqueeze(1)


@_model((B, N, N, 3, 6), (B, N, C, 3, 6))
def attention_over_frames_for_each_pixel(m: Any, scores: Tensor, frames: Tensor) -> Tensor:
    seen = torch.einsum("bsthw,bsdhw->btdhw", scores.softmax(1), frames)
    return frames + torch.relu(m.one(seen.movedim(2, -1))).movedim(-1, 2)


@_model((B, N, 3, 6), (B, N, C, 3, 6), (B, C, 3, 6))
def selective_kernels_for_each_pixel(m: Any, scores: Tensor, branches: Tensor, x: Tensor) -> Tensor:
    chosen = torch.einsum("bshw,bsdhw->bdhw", scores.softmax(1), branches)
    return x + torch.relu(m.one(chosen.movedim(1, -1))).movedim(-1, 1)


@_model((B, N, N, S), (B, N, C, S))
def graph_convolution_at_each_time(m: Any, adjacency: Tensor, x: Tensor) -> Tensor:
    near = torch.einsum("bvwt,bwct->bvct", adjacency.softmax(2), x)
    return torch.relu(m.one(near.mT) + m.two(x.mT)).mT


@_model((B, N, C, S), (B, N, S))
def pooling_that_is_added_to_all_nodes(m: Any, x: Tensor, scores: Tensor) -> Tensor:
    pooled = (scores.softmax(1).unsqueeze(2) * x).sum(1)
    return x + torch.relu(m.one(pooled.mT)).mT.unsqueeze(1)


@_model((B, N, C), (B, N, N), (B, N))
def graph_layer_with_a_readout_for_all_nodes(m: Any, x: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
    readout = (mask.unsqueeze(-1) * x).sum(1) / mask.square().sum(1, keepdim=True)
    return x + torch.relu(m.one(adjacency.softmax(-1) @ x)) + m.two(readout).unsqueeze(1)


@_model((B, N, C))
def channels_scaled_by_pooled_positions(m: Any, x: Tensor) -> Tensor:
    pooled = torch.einsum("bn,bnc->bc", m.wide(x.flatten(1)).softmax(-1), x)
    return x * torch.sigmoid(m.one(pooled)).unsqueeze(1)


@_model(SETS)
def members_beside_their_gated_mean(m: Any, members: Tensor) -> Tensor:
    weights = m.wide(members.flatten(-2)).softmax(-1)
    return members - m.one((weights.unsqueeze(-1) * members).sum(-2)).unsqueeze(-2)


@_model((B, N, C))
def positions_mixed_and_gated_by_one_vector(m: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(m.one(torch.einsum("t,btc->bc", m.nodes.softmax(0), x)))
    return x + torch.einsum("st,btc->bsc", m.matrix, x) * gate.unsqueeze(1)


@_model((B, 3 * C, C))
def mixer_of_more_tokens_than_channels(m: Any, x: Tensor) -> Tensor:
    """A token's channels are fewer than the tokens of a channel, which are no channels of several rows."""
    h = F.gelu(m.many(x.mT)).mT + m.one(x.mean(1)).unsqueeze(1)
    return x + m.others(h.mT).mT


@_model(TOKENS)
def tasks_of_which_one_shares_a_feature(m: Any, x: Tensor) -> Any:
    experts = [torch.tanh(m.one(x) * (i + 1)) for i in range(N)]
    gates = m.matrix.softmax(-1)
    tasks = [sum(gates[task, i] * experts[i] for i in range(N)) for task in range(N)]
    return tasks[0] + torch.relu(m.two(sum(experts) / N)), *tasks[1:]  # type: ignore[operator, arg-type]


@_model((B, N, C), (B, N, N))
def graph_layer_with_a_virtual_node(m: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    """All nodes get what is made of the mean of their neighbours."""
    for _ in range(2):
        x = adjacency @ x + m.two(torch.relu(m.one((adjacency @ x).mean(1)))).unsqueeze(1)
    return x


@_model((B, N, C), (B, N, N))
def graph_layer_that_pools_what_it_makes(m: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    for _ in range(2):
        near = adjacency @ x
        x = near + m.two(torch.relu(m.one(near.mean(1)))).unsqueeze(1)
    return x


@_model((B, N, C))
def attention_that_is_pooled(m: Any, x: Tensor) -> Tensor:
    return x + m.two(((m.one(x) @ x.mT).softmax(-1) @ x).mean(1)).unsqueeze(1)


@_model((B, N, C), (B, N, N))
def state_of_a_graph_along_its_edges(m: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    for _ in range(2):
        state = torch.relu(m.one((adjacency @ x).mean(1)))
        x = adjacency @ x + adjacency @ state.unsqueeze(1).expand_as(x)
    return x


@_model((B, N, C), (B, N, N), (B, N, N))
def state_of_a_graph_along_other_edges(m: Any, x: Tensor, adjacency: Tensor, others: Tensor) -> Tensor:
    for _ in range(2):
        state = torch.relu(m.one(x.mean(1)))
        x = adjacency @ x + others @ state.unsqueeze(1).expand_as(x)
    return x


@_model((B, N, C), (N, N))
def state_of_one_graph_along_its_edges(m: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    return x + adjacency @ m.one((adjacency @ x).mean(1)).unsqueeze(1).expand_as(x)


@_model((B, N, C), (B, N, N))
def state_of_a_graph_against_its_edges(m: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    return x + adjacency.mT @ m.one((adjacency @ x).mean(1)).unsqueeze(1).expand_as(x)


@_model((B, N, C))
def virtual_node_of_learned_edges(m: Any, x: Tensor) -> Tensor:
    near, far = m.matrix.softmax(-1), m.matrix.tanh()
    for layer in (m.one, m.two):
        state = torch.relu(layer((near @ x).sum(1)))
        x = near @ x + far @ state.unsqueeze(1).expand_as(x)
    return x


@_model((B, N, C))
def pooled_attention_that_attends_back(m: Any, x: Tensor) -> Tensor:
    near, far = (m.one(x) @ x.mT).softmax(-1), (m.two(x) @ x.mT).softmax(-1)
    return far @ x + near @ m.one((near @ x).mean(1)).unsqueeze(1).expand_as(x)


@_model((B, N, C))
def attention_to_few_slots(m: Any, x: Tensor) -> Tensor:
    """As a Perceiver has, and a layer of inducing points."""
    slots = m.gate.expand(3, C) * m.nodes[:3, None]
    there, back = (slots @ m.one(x).mT).softmax(-1), (m.two(x) @ slots.T).softmax(-1)
    return x + back @ m.one((there @ x).mean(1, keepdim=True)).expand(-1, 3, -1)


@_model((B, N, C))
def soft_mixture_of_experts(m: Any, x: Tensor) -> Tensor:
    logits = x @ m.many.weight[:3, :C].T
    return x + logits.softmax(-1) @ m.one((logits.softmax(1).mT @ x).mean(1, keepdim=True)).expand(-1, 3, -1)


@_model((B, N, C), (B, C), (B, N, N))
def state_from_outside_along_edges(m: Any, x: Tensor, state: Tensor, adjacency: Tensor) -> Tensor:
    return adjacency @ x + adjacency.mT @ m.one(state).unsqueeze(1).expand_as(x)


@_model((B, N, C))
def mixer_with_a_pooled_mix(m: Any, x: Tensor) -> Tensor:
    return m.matrix @ x + m.two(torch.relu(m.one((m.matrix.mT @ x).mean(1)))).unsqueeze(1)


@_model((B, N, C))
def pooling_on_a_graph_with_learned_edges(m: Any, x: Tensor) -> Tensor:
    """Each layer takes a step, pools, and hands the pooled state to all nodes along with a second step."""
    steps = [m.matrix.softmax(-1), m.matrix.tanh(), m.matrix.mT.softmax(-1)]
    for first, second, third in (steps, steps[::-1]):
        near = first @ x
        x = third @ (m.two(torch.relu(m.one(near.sum(1)))).unsqueeze(1) + second @ near)
    return x


@_model((B, N, C))
def pooled_attention_that_returns_other_weights(m: Any, x: Tensor) -> Any:
    """As a module does whose weights somebody wants to see."""
    weights, others = (m.one(x) @ x.mT).softmax(-1), (m.two(x) @ x.mT).softmax(-1)
    return (weights @ x).mean(1), others


@_model(TOKENS)
def linear_layer_of_few_channels(m: Any, x: Tensor) -> Tensor:
    """A vector, repeated for a wide layer, is one sum over rows of its weight."""
    wide = m.wide(torch.cat([x] * N, -1))
    return x + wide.mean(-1, keepdim=True) * torch.relu(m.one(x))


@_model(TOKENS, SETS)
def experts_that_attend_to_each_other(m: Any, x: Tensor, experts: Tensor) -> Tensor:
    return x + m.one(((experts @ experts.mT).softmax(-1) @ experts).mean(-2))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_is_rewritten_or_told(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    reports = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        reports.append(passes.run_recursively(gm))
        return gm.forward

    torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    assert reports
    for report in reports:
        assert not report.sites, str(report)
        assert not report.errors, str(report)
