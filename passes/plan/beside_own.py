"""Gates that an operator could make, beside a read with gates of the program's own.

Such a read waits for its gates, so no operator can make the other gates and read the streams. But the write before it
can make the logits of all gates as it goes (`fuse.reads`). For that, sigmoids are left to the program, too. A Sinkhorn
becomes an operator of its own.
"""

from __future__ import annotations

from torch import fx

from mhc_compile.passes.plan.sites import AggregateSite, CombineSite, Decline, MixSite, SinkhornSite, Site
from mhc_compile.passes.plan.surroundings import check_site
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.gates import Identified, Matrices, matrices
from mhc_compile.passes.shadow import Shadow, Value


def leave_beside_own(shadow: Shadow, findings: Findings, reached: set[fx.Node], sites: list[Site]) -> dict[Value, str]:
    """Take operators out of `sites` that make no gate of the read; returns the gates that are left, with the reason."""
    left: dict[Value, str] = {}
    identified: Identified = {}
    written = {gate for site in sites if isinstance(site, CombineSite) for gate in site.gates()}
    for site in [site for site in sites if isinstance(site, MixSite)]:
        used = {value for value in site.made() if value.users or value.is_output}
        # A gate that no write takes is in a report only if an operator makes it.
        if not used <= written or not _waits(site, sites, findings):
            continue
        alone: list[Site] = []
        if site.res is not None and site.res.value in used:
            made = matrices(site.res.value, identified)
            if not isinstance(made, Matrices):
                continue
            alone = [SinkhornSite(made)]
            try:
                check_site(shadow, reached, alone[0])
            except Decline:
                continue
        at = sites.index(site)
        sites[at : at + 1] = alone
        if site.post is not None:
            left[site.post.value] = "left to the program, as h_pre is"
    return left


def _waits(site: MixSite, sites: list[Site], findings: Findings) -> bool:
    """Whether the streams of a site are read with a gate that is made of them, and not by the site."""
    return site.pre is None and any(
        read.aggregate.x is site.x and site.x in findings.connections.between(site.x, read.aggregate.gate)
        for read in sites
        if isinstance(read, AggregateSite)
    )
