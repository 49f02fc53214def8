"""Pages: what users wrote is text, data are short, charts and controls work in a browser."""

import collections
import json
import math
import re

import pytest
from rich.text import Text

from research_dp.console import table
from research_dp.html_page import Page
from research_dp.html_text import inline

ODD = "<script>alert(1)</script>"
MARKS = ".role-mark.mark-symbol path"
NAMES = ("ddp", ODD, "a \"quoted\" & 'b' \u2028")


def example():
    """A page with all that a page can have."""
    import altair as alt

    page = Page(f"Runs {ODD}", NAMES, "run")
    page.bullets([ODD])
    shown = table(ODD, "run", "verdict~", "bytes:", grouped=True)
    shown.add_row(ODD, Text(f"differs {ODD}", "bold red"), "1")
    page.table(shown)
    steps = range(1, 41)
    columns = {
        "run": [name for name in NAMES for _ in steps],
        "step": [step for _ in NAMES for step in steps],
        "loss": [n + 1 / step + step % 2 for n in range(3) for step in steps],
        "zero": [0.0 for _ in NAMES for _ in steps],
    }
    columns["loss"][7] = math.nan
    data = page.data("train", columns)
    options = {"tooltip": ["run:N"], "log": False, "smoothed": 3}
    charts = (
        page.lines(data, alt.X("step:Q"), field, f"{field} {ODD}", **options)
        for field in ("loss", "zero")
    )
    page.charts(*charts)
    sent = page.data("sent", {"run": list(NAMES), "bits": [1e9, 2e9, 4e9]})
    slider = alt.binding_range(min=1e9, max=2e9, step=1e9, name="Link speed")
    bars = (
        alt.Chart(sent)
        .transform_calculate(time="datum.bits / speed")
        .mark_bar()
        .encode(
            alt.X("time:Q", scale=alt.Scale(domain=[0, 4])), alt.Y("run:N"), **page.look("color")
        )
        .add_params(alt.param(name="speed", value=1e9, bind=slider))
    )
    page.charts(bars)
    with page.details("folded"):
        page.table(shown)
    return page


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(example().text(), encoding="utf-8")
    return path


def points(chart):
    """The places of a chart's points."""
    return [mark.get_attribute("transform") for mark in chart.locator(MARKS).all()]


def test_what_users_wrote_is_text_in_html_and_in_the_data(file):
    text = file.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text and "<script>alert" not in text
    assert "<td>&lt;script&gt;alert(1)&lt;/script&gt;</td>" in text
    (told,) = re.findall(r'id="page-data">(.*?)</script>', text, re.S)
    assert "\u2028" not in told
    assert set(json.loads(told)["data"]["train"]["run"]) == set(NAMES)
    assert len(re.findall("</script", text)) == 2  # Vega's scripts do not end their element


def test_colours_of_a_terminal_are_classes():
    assert inline(Text("a<b", "bold red")) == '<span class="red bold">a&lt;b</span>'
    assert inline(Text("a ").append("b", "green")) == 'a <span class="green">b</span>'


def test_numbers_are_short_and_what_is_none_is_null():
    page = Page("x")
    values = [math.pi * 1e-7, 2.0, math.nan, math.inf, None, 123_456_789, 1e9]
    page.data("d", {"y": values})
    (told,) = page._data.values()
    assert told["y"] == [3.1416e-7, 2, None, None, None, 123_456_789, 1e9]


@pytest.mark.parametrize("columns", [{"a b": [1]}, {"a": [1], "b": [1, 2]}])
def test_data_that_charts_cannot_name_or_that_do_not_match_are_refused(columns):
    with pytest.raises(ValueError, match="odd fields"):
        Page("x").data("d", columns)


def test_forty_series_look_different():
    looks = Page("x", map(str, range(40))).look("color", "strokeDash").values()
    pairs = zip(*(look.to_dict()["scale"]["range"] for look in looks), strict=True)
    assert len({(color, tuple(dash)) for color, dash in pairs}) == 40


def test_a_page_without_charts_needs_no_script():
    page = Page("x")
    page.prose("y")
    assert len(page.text()) < 10_000 and "<script" not in page.text()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_from_disk_without_errors_requests_or_overflow(open_page, file, scheme, width):
    page = open_page(file, scheme=scheme, width=width)
    assert page.problems == []
    assert page.requested == [file.as_uri()]
    charts = page.locator(".chart").all()
    assert len(charts) == 3
    for chart in charts:
        assert chart.locator(".role-mark path").count() > 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # What users wrote is shown, not run.
    assert ODD in page.locator("h1").inner_text()
    assert ODD in page.locator("figcaption").first.inner_text()
    assert page.locator(".role-legend-label text", has_text=ODD).count() == 2
    # Text of charts has the page's colour, which differs from that of the background.
    style = "e => [getComputedStyle(e).fill, getComputedStyle(document.body).color]"
    fill, ink = page.locator(".chart .role-axis-label text").first.evaluate(style)
    assert fill == ink
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 300) == (scheme == "dark")
    page.close()


def opacities(chart):
    """How many of a chart's points have which opacity."""
    return collections.Counter(mark.get_attribute("opacity") for mark in chart.locator(MARKS).all())


@pytest.mark.slow
def test_controls_work(open_page, file):
    page = open_page(file)
    loss, zero, bars = page.locator(".chart").all()
    labels, rough = loss.locator(".role-axis-label text").all_text_contents(), points(loss)
    assert zero.get_by_label("logarithmic").count() == 0  # it has no logarithms
    loss.get_by_label("logarithmic").focus()
    page.keyboard.press("Space")
    page.wait_for_timeout(300)
    assert loss.locator(".role-axis-label text").all_text_contents() != labels
    assert len(points(loss)) == 3 * 40 - 1 and points(loss) != rough
    switched = points(loss)
    loss.get_by_label("smoothed").click()
    page.wait_for_timeout(300)
    assert points(loss) != switched
    loss.get_by_label("smoothed").click()
    entry = loss.locator(".role-legend-label text").first
    entry.click()
    page.wait_for_timeout(300)
    assert sorted(opacities(loss).values()) == [39, 80]
    loss.locator(".role-legend-label text").last.click(modifiers=["Shift"])
    page.wait_for_timeout(300)
    assert sorted(opacities(loss).values()) == [40, 79]
    assert len(opacities(zero)) == 1
    before = points(loss)
    loss.locator(MARKS).nth(60).hover()
    assert page.locator("#vg-tooltip-element").inner_text().startswith("run")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_timeout(300)
    assert points(loss) != before
    slider = page.get_by_label("Link speed")
    before = bars.locator(".mark-rect path").last.bounding_box()["width"]
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)
    after = bars.locator(".mark-rect path").last.bounding_box()["width"]
    assert after == pytest.approx(before / 2, rel=0.02)
    assert page.problems == []
    page.close()


@pytest.mark.slow
def test_what_is_folded_is_in_print(open_page, file):
    page = open_page(file, scheme="dark")
    table_ = page.locator("details table")
    assert not table_.is_visible()
    page.emulate_media(media="print")
    assert table_.is_visible()
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert sum(map(int, re.findall(r"\d+", ink))) < 200  # on white paper
    assert page.pdf().startswith(b"%PDF")
    assert page.problems == []
    page.close()


@pytest.mark.slow
def test_without_scripts_tables_are_there_and_a_line_says_so(open_page, file):
    page = open_page(file, scripts=False)
    assert "switched off" in page.locator("noscript").inner_text()
    assert page.locator("table").first.is_visible()
    page.close()
