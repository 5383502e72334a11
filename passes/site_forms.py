"""The form of a site in words: its sizes, its norm and its Sinkhorn."""

from __future__ import annotations

from collections.abc import Iterator

from mhc_compile.forms import Sinkhorn
from mhc_compile.passes.plan import AggregateSite, CombineSite, MixingSite, MixSite, ProjectionSite, SinkhornSite, Site
from mhc_compile.passes.plan.sites import visible
from mhc_compile.passes.recognise.combine import Mix
from mhc_compile.passes.shadow import Value


def form_of(site: Site) -> str:
    """The form of a site, for the line below it in a report."""
    if isinstance(site, CombineSite):
        c = site.combine
        kinds = " + ".join(dict.fromkeys(_mixed(mix) for mix in sorted(c.mixes, key=lambda mix: mix is not c.mix)))
        kinds = "x" if c.is_plain else kinds
        return f"n = {c.streams.n}, C = {c.streams.channels}, {_dtype(c.x)}, h_post f + {kinds}"
    if isinstance(site, MixingSite):
        n, m, channels = site.mixing.sizes
        return f"n = {n}, {m} rows, C = {channels}"
    if isinstance(site, AggregateSite):
        return ", ".join([f"n = {site.aggregate.streams.n}, C = {site.aggregate.streams.channels}", *_norm(site)])
    if isinstance(site, SinkhornSite):
        return _half_steps(site.matrices.kind.form)
    if isinstance(site, ProjectionSite):
        rows = str(site.rows) if site.rows_read in (None, site.rows) else f"{site.rows_read} of {site.rows}"
        if site.streams.n == 1:  # of something that is made of the streams, such as a dropout
            return f"{site.streams.channels} values a token, {rows} logits"
        return f"n = {site.streams.n}, C = {site.streams.channels}, {rows} logits"
    parts = [f"n = {site.streams.n}, C = {site.streams.channels}, {_dtype(site.x)}"]
    rms = site.normed.rms
    parts.append("no norm" if rms.mode == "none" else f"rms eps {rms.eps:g} {rms.mode}")
    if site.res is not None:
        parts.append(_half_steps(site.sinkhorn))
    if site.logits is not None and site.logits.rows_read:
        parts.append(f"{site.logits.rows_read} logit{'s' * (site.logits.rows_read > 1)} more")
    return ", ".join([*parts, *_norm(site)])


def _norm(site: AggregateSite | MixSite) -> Iterator[str]:
    """What there is to say of the norm that reads the layer input."""
    if site.norm is not None:
        yield f"input norm eps {site.norm.eps:g}"
    if site.norm_apart:
        yield f"the RMS norm after it stays apart: {site.norm_apart}"


def _dtype(streams: Value) -> str:
    """The dtype in which an operator gets the streams: recognition looks through the casts before them."""
    return str((visible(streams) or streams).dtype).removeprefix("torch.")


def _mixed(mix: Mix) -> str:
    if mix.to_all:
        return "a sum of x to all"
    if mix.is_matrix:
        return "h_res^T x" if mix.is_transposed else "h_res x"
    return "a diagonal h_res x"


def _half_steps(form: Sinkhorn) -> str:
    steps = f"sinkhorn {form.start}, {form.first} first, {form.steps} half-steps"
    if form.without_eps:
        return f"{steps}, no eps"
    apart = "" if form.start_eps in (0.0, form.eps) else f" ({form.start_eps:g} at the start)"
    return f"{steps}, eps {form.eps:g}{' clamped' if form.clamp else ''}{apart}"
