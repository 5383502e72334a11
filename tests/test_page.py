"""The page about a report: everything in the report is on it, as text, and nothing else is loaded."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser

import pytest

from mhc_compile.encoding import in_one_line
from mhc_compile.page import size
from mhc_compile.page.layers import layers, with_fusion
from mhc_compile.passes.report import Location, Report, SiteReport, Traffic
from tests.browser.models import HOSTILE, READ, WRITE, report

_VOID = {"meta", "input"}


class Page(HTMLParser):
    """A page as text, with its elements; mismatched tags are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.parts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = " ".join("".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("th", "td", "p"):
            self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & {*self.open}:
            self.parts.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module", params=[0, 2, 60])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


def test_every_site_and_every_reason_is_on_the_page(depth: int) -> None:
    told = report(depth)
    page = Page(told.html())
    lines = Counter(f"{site.location} {site.location.code}" for site in told.sites)
    for line, count in lines.items():
        assert page.text.count(words(line)) >= count
    for site in (*told.sites, *told.cut):
        assert words(site.detail) in page.text
        assert words(site.reason or "") in page.text
        assert site.module in page.text
    for site in told.with_own_gates:
        assert site.own in page.text
    for error in told.errors:
        assert error in page.text
    assert page.text.count("generate_mix_and_aggregate ✓ rewritten") == sum(one.op == READ for one in told.rewritten)
    for counts in told.fusions.items():
        assert "{1} × {0}".format(*counts) in page.text


def test_what_a_program_says_stays_text() -> None:
    page = Page(report(3).html())
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert [tag for tag, _ in page.elements].count("style") == 1
    assert "b" not in {tag for tag, _ in page.elements}
    assert HOSTILE in page.text
    assert "&lt;script" not in page.text


def test_every_place_is_escaped() -> None:
    """Each field of a report in turn holds a tag."""
    tag = "<i data-planted='1'>"
    site = SiteReport(tag, Location(tag, 1, tag), tag, None, tag, f"layers.0.{tag}", None, None, "a")
    lost = SiteReport(tag, Location(tag, 1, tag), tag, tag, module=f"{tag}.1")
    function = SiteReport("function", Location(tag, 1, tag), tag, tag)
    told = Report([site, lost], [site], [lost, function], [tag], 1, errors=[tag], unchecked=[lost], breaks=[tag])
    told.excerpts, told.skipped, told.idle = {"a": [tag, tag]}, [tag], [tag]
    told.fusions = told.shared = told.lowered = told.checked = Counter({tag: 1})
    page = Page(told.html({tag: 1.0}))
    assert "i" not in {name for name, _ in page.elements}
    assert page.values("data-planted") == []
    assert page.text.count(tag) > 20


def test_no_name_reaches_the_terminal_as_a_command() -> None:
    """Names of modules, files and lines are the program's. A report shows what moves a cursor by its code."""
    name = "a\x1b[2J\r\u202eb\n  error: made up"
    told = Report(
        [SiteReport("aggregate", Location(f"/folder/{name}.py", 3, name), name, name, name, name)],
        cut=[SiteReport("function", Location(name, 1, name), "not compiled", name)],
        errors=[name],
        graphs=1,
    )
    for text in (
        str(told),
        told.details(),
        *told.told_of_cut(),
        str(told.sites[0].location),
        in_one_line(OSError(name)),
    ):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text), text
        assert "a\\x1b[2J" in text
        assert not re.search("^  error: made up", text, flags=re.MULTILINE)
    assert told.sites[0].location.is_among([f"{name}.py:3", f"folder/{name}.py:3"])
    assert not set(told.html()) & {"\x1b", "\u202e"}


def test_nothing_is_loaded(depth: int) -> None:
    text = report(depth).html()
    page = Page(text)
    assert re.findall(r"https?:|//[a-z]|url\(|@import", re.sub(r"^\s*// .*$", "", text, flags=re.MULTILINE)) == []
    assert page.values("src") == []
    assert {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "embed", "form"} == set()
    (policy,) = [value for value in page.values("content") if "default-src" in value]
    assert policy.startswith("default-src 'none'; ")
    assert all(link.startswith("#") for link in page.values("href"))


def test_links_lead_somewhere(depth: int) -> None:
    page = Page(report(depth).html())
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.values("href")} <= set(ids)
    assert set(page.values("aria-labelledby")) <= set(ids)


def test_headings_have_an_order(depth: int) -> None:
    levels = [int(tag[1]) for tag, _ in Page(report(depth).html()).elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_layer_is_an_entry_of_a_numbered_list() -> None:
    modules = ["embedding", "model.layers.0.a", "model.layers.0", "model.layers.1.b.2", "", "head.x1"]
    told = Report([SiteReport("head", Location("m.py", 1, ""), "", module=name) for name in modules])
    assert [(one.name, len(one.entries)) for one in layers(told)] == [
        ("embedding", 1),
        ("model.layers.0", 2),
        ("model.layers.1", 1),
        ("", 1),
        ("head.x1", 1),
    ]


def test_layers_that_are_the_same_say_so() -> None:
    found = layers(report(60))
    assert len(found) == 60
    alike = {one.name: one.like.name for one in found if one.like}
    # The first and the last are fused on one side alone. The second has gates of its own, the third loses a site.
    assert alike == {f"layers.{number}": "layers.3" for number in range(4, 59)}


def test_a_sublayer_ends_with_its_write() -> None:
    (layer,) = layers(report(1))
    assert [[entry.site.op for entry in one.entries] for one in layer.sublayers] == [[READ, WRITE], [READ, WRITE]]
    assert [one.modules for one in layer.sublayers] == [["attention"], ["mlp"]]


def test_a_cut_belongs_to_its_site() -> None:
    layer = layers(report(3))[2]
    assert layer.name == "layers.2"
    assert layer.statuses == {"declined": 1, "cut": 1}
    (cut,) = [entry for entry in layer.entries if entry.cut]
    assert (cut.site.op, cut.site.module, cut.status) == (WRITE, "layers.2.attention", "rewritten")


def test_fused_operators_take_the_place_of_their_sites() -> None:
    told = report(2)
    alone = sum(site.after.moved for site in told.sites if site.after)
    first, last = told.sites[0].after, told.sites[-1].after
    assert first is not None
    assert last is not None
    whole = with_fusion(told, layers(told))
    assert whole is not None
    assert whole.moved == first.moved + last.moved + 3 * 806_000_000 < alone


def test_a_count_that_is_not_known_is_not_shown_as_a_part() -> None:
    told = report(2)
    told.sites[3] = SiteReport(WRITE, told.sites[3].location, "", module=told.sites[3].module)
    told.fused = told.fused[:1]
    page = Page(told.html())
    assert "Bytes read and written 45" not in page.text
    assert "Bytes read and written not counted not counted not counted" in page.text


def test_the_time_is_what_was_measured() -> None:
    assert "Time: not measured." in Page(report(2).html()).text
    page = Page(report(2).html({"eager": 12.5, "mhc": 3.25}))
    assert "not measured" not in page.text
    assert "eager 12.5 mhc 3.25" in page.text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (1.34e12, "1.34 TB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(int(count)) == text


def test_traffic_adds_up() -> None:
    assert Traffic(3, 1) + Traffic(4, 2) == Traffic(7, 3)


def test_an_empty_report_has_a_page() -> None:
    text = Page(Report().html()).text
    assert "No site was found." in text
    assert "0 of 0 hyper-connection sites rewritten" in text


def test_without_jinja2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'mhc-compile\[html\]'"):
        report(2).html()


def test_the_package_does_not_import_the_page() -> None:
    code = "import sys, mhc_compile, mhc_compile.passes.report; print('mhc_compile.page' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
