"""A report as one page of HTML that loads nothing else. `Report.html` makes it.

`layers.py` says which site belongs to which layer, `page.html` is the template; `page.css` and `page.js` are put into
the page as they are. Everything in a report is text: the template escapes it, and the page's content security
policy allows no other script and no request.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from mhc_compile.encoding import printable
from mhc_compile.page.layers import layers, total, with_fusion

if TYPE_CHECKING:
    from mhc_compile.passes.report import Report, SiteReport

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def page(report: Report, times: Mapping[str, float]) -> str:
    """The page about a report; times are milliseconds by what was measured.

    Raises ImportError if jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("report.html() needs jinja2: pip install 'mhc-compile[html]'") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"size": size, "number": _number}
    script, found = _file("page.js"), layers(report)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.from_string(_file("page.html")).render(
        report=report,
        summary=str(report).partition("\n")[0].removeprefix("mhc: "),
        layers=found,
        times=times,
        before=total(entry.site.before for layer in found for entry in layer.rewritten),
        after=total(entry.site.after for layer in found for entry in layer.rewritten),
        fused=with_fusion(report, found),
        functions=[site for site in report.cut if site.op == "function"],
        losses=_losses(found),
        counters={
            "Fused, forward and backward": report.fusions,
            "Compiled once": report.shared,
            "Lowered": report.lowered,
            "Checked in the first calls": report.checked,
        },
        users=_users(report),
        style=_file("page.css"),
        script=script,
        digest=digest,
    )
    return printable(text)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def size(count: int) -> str:
    """Bytes in the decimal unit that leaves one to three digits before the point."""
    value, unit = float(count), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def _number(value: float) -> str:
    return f"{value:,.4g}"


def _losses(found: Any) -> list[tuple[str, SiteReport, str, list[Any]]]:
    """Each loss once for a line and a reason: how, where, why, and in which layers."""
    groups: dict[Any, tuple[str, SiteReport, str, list[Any]]] = {}
    for layer in found:
        for entry in layer.entries:
            for reason in entry.losses:
                status = "cut" if reason in entry.cut else entry.status
                key = (status, entry.site.op, entry.site.location, reason)
                where = groups.setdefault(key, (status, entry.site, reason, []))[3]
                if layer not in where:
                    where.append(layer)
    return list(groups.values())


def _users(report: Report) -> dict[str, SiteReport]:
    """By excerpt, the first site that has it."""
    first: dict[str, SiteReport] = {}
    for site in report.sites:
        if site.excerpt in report.excerpts:
            first.setdefault(site.excerpt, site)
    return first
