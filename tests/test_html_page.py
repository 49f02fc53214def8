"""Pages: what users wrote is text, data are short, charts and controls work in a browser."""

import json
import math
import re

import pytest
from rich.text import Text

from research_dp.console import table
from research_dp.html_page import Page, Slider
from research_dp.html_text import inline

ODD = "<script>alert(1)</script>"
NAMES = ("ddp", ODD, "a \"quoted\" & 'b' \u2028")


def lines(page, data, field, title):
    import altair as alt

    y = alt.Y(f"{field}:Q", title=None)
    chart = alt.Chart(data).mark_line(point=True)
    return chart.encode(
        alt.X("step:Q"), y, page.color("run"), page.dash("run"), tooltip=["run:N"]
    ).properties(title=title, height=200)


def example():
    """A page with all that a page can have."""
    import altair as alt

    page = Page(f"Runs {ODD}", NAMES)
    page.bullets([ODD])
    page.terms([(ODD, "a & b")])
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
    data = page.data("train", columns, series="run", smoothed=["loss"])
    charts = (lines(page, data, field, f"{field} {ODD}") for field in ("loss", "zero"))
    page.charts(*charts, y_scale="linear", smoothing=True)
    sent = page.data("sent", {"run": list(NAMES), "bits": [1e9, 2e9, 4e9]}, series="run")
    bars = (
        alt.Chart(sent)
        .transform_calculate(time="datum.bits / speed")
        .mark_bar()
        .encode(alt.X("time:Q", scale=alt.Scale(domain=[0, 4])), alt.Y("run:N"), page.color("run"))
        .add_params(alt.param(name="speed", value=1e9))
    )
    speeds = Slider("speed", "Link speed", (1e9, 2e9), ("1 Gbit/s", "2 Gbit/s"))
    page.charts(bars, slider=speeds, legend=False)
    with page.details("folded"):
        page.table(shown)
        page.charts(lines(page, data, "loss", "folded"), y_scale="log")
    return page


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(example().text(), encoding="utf-8")
    return path


def points(chart):
    """The places of a chart's points."""
    return [mark.get_attribute("transform") for mark in chart.locator(".mark-symbol path").all()]


def test_what_users_wrote_is_text_in_html_and_in_the_data(file):
    text = file.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text and "<script>alert" not in text
    assert "<td>&lt;script&gt;alert(1)&lt;/script&gt;</td>" in text
    (told,) = re.findall(r'id="page-data">(.*?)</script>', text, re.S)
    assert "\u2028" not in told
    assert json.loads(told)["data"]["train"]["columns"]["run"]["texts"] == list(NAMES)
    assert len(re.findall("</script", text)) == 3  # Vega's scripts do not end their element


def test_colours_of_a_terminal_are_classes():
    assert inline(Text("a<b", "bold red")) == '<span class="red bold">a&lt;b</span>'
    assert inline(Text("a ").append("b", "green")) == 'a <span class="green">b</span>'


def test_numbers_are_short_and_what_is_none_is_null():
    page = Page("x")
    values = [math.pi * 1e-7, 2.0, math.nan, math.inf, None, 123_456_789, 1e9]
    page.data("d", {"y": values})
    (told,) = page._data.values()
    assert told["columns"]["y"]["numbers"] == [3.1416e-7, 2, None, None, None, 123_456_789, 1e9]


@pytest.mark.parametrize("columns", [{"a b": [1]}, {"a": [1], "b": [1, 2]}])
def test_data_that_charts_cannot_name_or_that_do_not_match_are_refused(columns):
    with pytest.raises(ValueError, match="odd fields"):
        Page("x").data("d", columns)


def test_forty_series_look_different():
    page = Page("x", map(str, range(40)))
    colors, dashes = (encoding("x").to_dict() for encoding in (page.color, page.dash))
    pairs = zip(colors["scale"]["range"], dashes["scale"]["range"], strict=True)
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
    assert len(charts) == 4
    for chart in charts:
        assert chart.locator(".role-mark path").count() > 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # What users wrote is shown, not run.
    assert ODD in page.locator("h1").inner_text()
    assert ODD in page.locator("figcaption").first.inner_text()
    assert page.locator("button", has_text=ODD).count() == 2
    # Text of charts has the page's colour, which differs from that of the background.
    style = "e => [getComputedStyle(e).fill, getComputedStyle(document.body).color]"
    fill, ink = page.locator(".chart .role-axis-label text").first.evaluate(style)
    assert fill == ink
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 300) == (scheme == "dark")
    page.close()


@pytest.mark.slow
def test_controls_work_by_keyboard(open_page, file):
    page = open_page(file)
    loss, zero, bars, _ = page.locator(".chart").all()
    rough, flat = points(loss), points(zero)
    page.get_by_label("Smoothing").first.focus()
    for _ in range(3):
        page.keyboard.press("PageUp")
    page.wait_for_function("document.querySelector('output').textContent !== 'none'")
    page.wait_for_timeout(300)
    smooth = points(loss)
    assert len(smooth) == len(rough) == 3 * 40 - 1  # one is no number
    assert smooth != rough and points(zero) == flat
    log = page.get_by_label("Logarithmic").first
    labels = loss.locator(".role-axis-label text").last.text_content()
    log.focus()
    page.keyboard.press("Space")
    page.wait_for_timeout(500)
    assert loss.locator(".role-axis-label text").last.text_content() != labels
    assert len(points(zero)) == 3 * 40  # it has no logarithms: the axis stays
    button = page.locator("button", has_text=ODD).first
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    assert button.get_attribute("aria-pressed") == "false"
    assert len(points(loss)) == 2 * 40 - 1
    page.keyboard.press("Shift+Enter")  # it alone
    page.wait_for_timeout(300)
    assert len(points(loss)) == 40
    page.keyboard.press("Shift+Enter")
    page.wait_for_timeout(300)
    assert len(points(loss)) == 3 * 40 - 1
    slider = page.get_by_label("Link speed")
    before = bars.locator(".mark-rect path").last.bounding_box()["width"]
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(300)
    assert slider.get_attribute("aria-valuetext") == "2 Gbit/s"
    after = bars.locator(".mark-rect path").last.bounding_box()["width"]
    assert after == pytest.approx(before / 2, rel=0.02)
    assert page.problems == []
    page.close()


@pytest.mark.slow
def test_what_is_folded_is_in_print_and_fits_the_screen_when_unfolded(open_page, file):
    page = open_page(file, scheme="dark")
    table_, chart = page.locator("details table"), page.locator("details .chart svg")
    assert not table_.is_visible()
    page.locator("summary").click()
    page.wait_for_timeout(300)
    assert chart.bounding_box()["width"] > 600
    page.locator("summary").click()
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
    assert not page.locator("form").first.is_visible()
    page.close()
