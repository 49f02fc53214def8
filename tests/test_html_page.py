"""Pages: what users wrote is text, data are short, charts and controls work in a browser."""

import collections
import json
import math
import re
import xml.etree.ElementTree

import jinja2
import PIL.Image
import pytest
from rich.text import Text

from research_dp import html_page
from research_dp.console import table
from research_dp.html_charts import Charts

ODD = "<script>alert(1)</script>"
MARKS = ".role-mark.mark-symbol path"
NAMES = ("ddp", ODD, "a \"quoted\" & 'b' \u2028")
EXAMPLE = """
{% extends "page.html" %}
{% from "parts.html" import bullets, figures, table %}
{% block body %}
{{ bullets([odd]) }}
{{ table(shown) }}
{{ figures(charts) }}
{{ figures([bars]) }}
<details><summary>folded</summary>{{ table(shown) }}</details>
{% endblock %}
"""


def render(template, **values):
    return html_page.render(html_page.environment().from_string(template), **values)


def example():
    """A page with all that a page can have."""
    import altair as alt

    charts = Charts(NAMES, "run")
    shown = table(ODD, "run", "verdict~", "bytes:", grouped=True)
    shown.add_row(ODD, Text(f"differs {ODD}", "bold red"), "1")
    steps = range(1, 41)
    columns = {
        "run": [name for name in NAMES for _ in steps],
        "step": [step for _ in NAMES for step in steps],
        "loss": [n + 1 / step + step % 2 for n in range(3) for step in steps],
        "zero": [0.0 for _ in NAMES for _ in steps],
    }
    columns["loss"][7] = math.nan
    data = charts.data("train", columns)
    options = {"tooltip": ["run:N"], "log": False, "smoothed": 3}
    lines = [
        charts.lines(data, alt.X("step:Q"), field, f"{field} {ODD}", **options)
        for field in ("loss", "zero")
    ]
    sent = charts.data("sent", {"run": list(NAMES), "bits": [1e9, 2e9, 4e9]})
    slider = alt.binding_range(min=1e9, max=2e9, step=1e9, name="Link speed")
    bars = (
        alt.Chart(sent)
        .transform_calculate(time="datum.bits / speed")
        .mark_bar()
        .encode(
            alt.X("time:Q", scale=alt.Scale(domain=[0, 4])),
            alt.Y("run:N"),
            color=charts.look()["color"],
        )
        .add_params(alt.param(name="speed", value=1e9, bind=slider))
    )
    title = f"Runs {ODD}"
    values = {"shown": shown, "charts": lines, "bars": bars.properties(description="Sent")}
    return render(EXAMPLE, title=title, odd=ODD, data=charts.columns, **values)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(example(), encoding="utf-8")
    return path


def points(chart):
    """The places of a chart's points."""
    return [mark.get_attribute("transform") for mark in chart.locator(MARKS).all()]


def test_what_users_wrote_is_text_in_html_in_the_data_and_in_charts(file):
    text = file.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text and "<script>alert" not in text
    assert "<td>&lt;script&gt;alert(1)&lt;/script&gt;</td>" in text
    (told,) = re.findall(r'id="page-data">(.*?)</script>', text, re.S)
    assert "\u2028" not in told
    assert set(json.loads(told)["train"]["run"]) == set(NAMES)
    assert len(re.findall("</script", text)) == 2  # Vega's scripts do not end their element
    specs = [json.loads(spec) for spec in re.findall(r"data-spec='(.*?)'>", text)]
    assert [spec["description"] for spec in specs] == [f"loss {ODD}", f"zero {ODD}", "Sent"]
    assert specs[2]["encoding"]["color"]["scale"]["domain"] == list(NAMES)


def test_colours_of_a_terminal_are_classes():
    inline = html_page.inline
    assert inline(Text("a<b", "bold red")) == '<span class="red bold">a&lt;b</span>'
    assert inline(Text("a ").append("b", "green")) == 'a <span class="green">b</span>'
    assert inline("a<b") == "a&lt;b"


def cells(shown):
    """The cells of each row of a table in HTML, and the classes of rows and cells."""
    rows = re.findall(r"<tr(.*?)>(.*?)</tr>", html_page.table_html(shown), re.S)
    return [(look, re.findall(r"<t[dh](.*?)>(.*?)</t[dh]>", row)) for look, row in rows]


def test_rows_of_one_group_are_under_one_line_and_cells_know_their_column():
    shown = table("", "run", "bytes:", 'why "so"~', grouped=True)
    for run in (Text("a", "red"), "a", "b"):
        shown.add_row(run, "1", "x")
    heads, *rows = cells(shown)
    assert heads == (
        "",
        [("", "run"), (' class="n"', "bytes"), (' class="prose"', "why &#34;so&#34;")],
    )
    assert [(look, row[0]) for look, row in rows] == [
        (' class="first"', ("", '<span class="red">a</span>')),
        ("", ("", "")),
        (' class="first"', ("", "b")),
    ]
    for _, row in rows:
        assert row[1:] == [
            (' class="n" data-head="bytes"', "1"),
            (' class="prose" data-head="why &#34;so&#34;"', "x"),
        ]
    shown.grouped = False
    assert [(look, row[0][1]) for look, row in cells(shown)[2:]] == [("", "a"), ("", "b")]


def test_a_value_that_a_template_lacks_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'y' is undefined"):
        render("{{ x }} {{ y }}", x=1)


def test_numbers_are_short_and_what_is_none_is_null():
    charts = Charts()
    values = [math.pi * 1e-7, 2.0, math.nan, math.inf, None, 123_456_789, 1e9]
    charts.data("d", {"y": values})
    assert charts.columns["d"]["y"] == [3.1416e-7, 2, None, None, None, 123_456_789, 1e9]


@pytest.mark.parametrize("columns", [{"a b": [1]}, {"a": [1], "b": [1, 2]}])
def test_data_that_charts_cannot_name_or_that_do_not_match_are_refused(columns):
    with pytest.raises(ValueError, match="odd fields"):
        Charts().data("d", columns)


def test_forty_series_look_different():
    look = Charts(map(str, range(40))).look()
    for channel in ("strokeDash", "shape"):
        pairs = zip(*(look[x]["scale"]["range"] for x in ("color", channel)), strict=True)
        assert len({json.dumps(pair) for pair in pairs}) == 40


def test_a_page_without_charts_needs_no_script(file):
    assert "<noscript>" in file.read_text(encoding="utf-8")
    text = render('{% extends "page.html" %}{% block body %}y{% endblock %}', title="x", data={})
    assert len(text) < 10_000 and "<script" not in text and "<noscript" not in text


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
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_chart_is_saved_as_a_picture_that_needs_no_page(open_page, file, scheme, tmp_path):
    page = open_page(file, scheme=scheme)
    for kind in ("SVG", "PNG"):
        with page.expect_download() as saved:
            page.locator("figure").first.get_by_role("button", name=kind).click()
        saved.value.save_as(tmp_path / kind)
    svg = (tmp_path / "SVG").read_text()
    assert saved.value.suggested_filename == "loss_script_alert_1_script_.png"
    xml.etree.ElementTree.fromstring(svg)
    assert not re.search(r"var\(|currentColor|color\(|color-mix", svg)
    assert "rgb(0,0,0)" not in svg  # what is transparent stays so
    assert 'stroke="rgb(81,157,238)"' in svg  # the first series, as on a light page
    with PIL.Image.open(tmp_path / "PNG") as image:
        assert image.width > 1000 and image.getpixel((0, 0))[:3] == (255, 255, 255)
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
