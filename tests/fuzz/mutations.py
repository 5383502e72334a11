"""Changes of a program's values, most of which change what it computes."""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line

# Changes of a value {v}: those before the mark leave what is computed as it is, those after it do not.
MUTATIONS = (
    "{v} = {v}.clone()",
    "{v} = {v}.contiguous()",
    "{v} = {v} * 1.0",
    "kept.append({v})",
    "kept.append({v}.mean())",
    "kept.append({v}.detach().sum())",
    "{v} = {v}.float().to({v}.dtype)",
    "torch._dynamo.graph_break()",
    # what is computed changes from here on
    "{v} = {v}.detach()",
    "{v} = 0.5 * {v} + 0.5 * {v}.detach()",
    "{v} = Halved.apply({v})",
    "{v} = Opposed.apply({v})",
    "if {v}.requires_grad: {v}.register_hook(lambda grad: 0.75 * grad)",
    "if {v}.requires_grad: {v}.register_hook(lambda grad: None)",
    "{v} = {v}.bfloat16().to({v}.dtype)",
    "{v} = {v}.half().to({v}.dtype)",
    "{v} = {v}.double().mul(1.25).to({v}.dtype)",
    "{v} = {v}.clamp(-0.5, 0.5)",
    "{v} = {v}.clamp(min=1e-3)",
    "{v} = {v}.clamp(max=30.0)",
    "{v} = {v} + 1e-3",
    "{v} = {v} * 1.001",
    "{v} = -{v}",
    "{v} = {v}.flip(-1)",
    "{v} = {v}.roll(1, 0)",
    "{v} = {v}.roll(1, -1)",
    "{v} = {v}.roll(1, 1)",
    # what only many tokens show
    "{v} = {v} * (1 + (torch.arange({v}.shape[1]) > 100).view(-1, *[1] * ({v}.dim() - 2)))",
    "{v} = torch.where(torch.ones_like({v}).cumsum(1) > 100, {v}.detach(), {v})",
    "{v} = torch.where(torch.ones_like({v}).cumsum(0) > 100, 0.5 * {v}, {v})",
    "{v} = torch.where(torch.ones_like({v}).sum() > 4000, 1.25 * {v}, {v})",
    "{v} = torch.cat([{v}[:, :100], 0.75 * {v}[:, 100:]], 1)",
    "{v} = {v} * (1 + 0.001 * {v}.abs().sum())",
    "{v} = {v}.transpose(-1, -2).contiguous().view({v}.shape)",
    "{v} = {v}.transpose(-1, -2) if {v}.shape[-1] == {v}.shape[-2] else {v}.flip(-2)",
    "{v} = {v}.transpose(0, 1) if {v}.shape[0] == {v}.shape[1] else {v}.flip(0)",
    "{v} = {v} + 0.1 * {v}.mean(0, keepdim=True)",
    "{v} = {v} * {v}.shape[0]",
    "{v} = {v}[:1].expand_as({v})",
    "{v} = torch.where({v} > 0, {v}, 0.9 * {v})",
    "{v} = torch.where({v}.isnan(), 0.0, {v})",
    "{v} = torch.cat([{v}[..., 1:], {v}[..., :1]], -1)",
    "{v} = {v} / {v}.detach().abs().max()",
    "{v} = {v} - {v}.mean(-1, keepdim=True)",
    "{v} = F.dropout({v}, 0.25, training=False)",
    "{v} = {v}.clone(); {v}.mul_(1.5)",
    "{v} = {v}.clone(); {v}[..., 0] = 0.25",
    "{v} = {v}.clone(); alias = {v}.view(-1); alias[1:3].add_(0.25)",
    "{v}.mul_(0.75)",
    "{v}[..., :1] *= 2.0",
    "with torch.no_grad(): {v} = {v} * 1.0",
    "with torch.no_grad(): {v}.add_(0.125)",
    "self.buffer.add_(1.0); {v} = {v} * self.buffer",
    "{v} = {v} * self.buffer; self.buffer.mul_(0.5)",
    "xs.mul_(0.5)",
    "x = x * 0.5",
)
BLOCKS = (
    "with torch.no_grad():",
    'with torch.autocast("cpu", torch.bfloat16):',
    'with torch.autocast("cpu", enabled=False):',
    "with torch.enable_grad():",
    "for _ in range(2):",
)


def mutate(pick: Pick, lines: list[Line], texts: list[list[str]], often: bool) -> None:
    """Put in a few mutations after the lines whose values they change."""
    for _ in range(pick([0, 1, 0, 1, 1, 2, 2, 3] if often else [0, 0, 0, 1])):
        where = pick([index for index, line in enumerate(lines) if line.mutable])
        texts[where] += pick(MUTATIONS).format(v=lines[where].names).split("; ")


def put_in_block(pick: Pick, texts: list[list[str]]) -> None:
    """Indent at most one run of statements under a block."""
    if pick([False] * 5 + [True]):
        begin = pick(range(1, len(texts)))
        end = begin + pick([1, 2, 3, 6])
        block = [f"    {text}" for group in texts[begin:end] for text in group]
        texts[begin:end] = [[pick(BLOCKS), *block]]
