"""A comparison as one HTML file: verdicts, configurations, curves, memory, bytes, time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from research_dp import html_page
from research_dp.comparison import chart_data, tables
from research_dp.comparison.comparison import Comparison, LinkTimes
from research_dp.comparison.runs import Run
from research_dp.html_charts import Charts, as_columns, legend_of

_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"))
_MOST_MARKERS = 2_000  # of a chart
_SMOOTHED = 0.025  # the part of a curve, on each side, that its moving average includes


def page(comparison: Comparison) -> str:
    """The page: one file that opens from disk, and needs no other."""
    runs = [run for run in comparison.runs if run.is_run]
    charts = Charts([run.name for run in runs], "run")
    memory = {run.name: tables.memory_parts(run) for run in runs}
    seconds = {
        f"{run.name} (CPU)" if run.platform == "cpu" else run.name: {
            name: seconds for name, seconds in run.seconds.items() if name != "total"
        }
        for run in runs
    }
    kinds = {run.name: run.wire.by_kind if run.wire else {} for run in runs}
    axes = {run.name: run.wire.by_axis if run.wire else {} for run in runs}
    per_step = "MB a device and step"
    links = comparison.links
    return html_page.render(
        "compare.html",
        title=comparison.title(),
        comparison=comparison,
        runs=runs,
        tables=tables,
        data=charts.columns,
        curves=_curves(charts, runs, comparison.reference),
        memory=_bars(charts, "memory", memory, "As the run compiled it", "MB", 1e6),
        wire=[
            *_bars(charts, "by_kind", kinds, "By kind of collective", per_step, 1e6),
            *_bars(charts, "by_axis", axes, "By mesh axis", per_step, 1e6),
        ],
        seconds=_bars(charts, "seconds_of", seconds, "Seconds of the training process", "seconds"),
        front=_front(charts, runs),
        links=_links(charts, links) if links and links.seconds else [],
        own_speed=_speed(links.own) if links else "",
    )


def _curves(
    charts: Charts, runs: Sequence[Run], reference: Run | None
) -> list[alt.TopLevelMixin] | None:
    """Loss against steps, bytes and seconds, and minus the reference's; evaluation; norm.

    None: no run has a record yet.
    """
    # One evaluation alone is no curve: the page's table has it.
    splits = {
        split: chart_data.curves(runs, split, reference)
        for split, least in (("train", 1), ("eval", 2))
        if any(len(run.column(split, "step")) >= least for run in runs)
    }
    if "train" not in splits:
        return None
    data = {split: charts.data(split, columns) for split, columns in splits.items()}
    sizes = np.abs(np.array(splits["train"]["difference"], float))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]

    def curve(split: str, x: str, y: str, title: str, x_title: str = "step") -> alt.TopLevelMixin:
        columns, scale = splits[split], alt.Scale(zero=False, nice=False, padding=8)
        return charts.lines(
            data[split],
            alt.X(x, type="quantitative", title=x_title, scale=scale),
            y,
            title,
            tooltip=["run:N", f"{x}:Q", f"{y}:Q"],
            smoothed=int(_SMOOTHED * len(columns["run"]) / len(runs)),
            markers=len(columns["run"]) <= _MOST_MARKERS,
            **(_both_signs(sizes) if y == "difference" else {"log": False}),
        )

    axes = {"step": "step", "sent": "GB sent per device", "seconds": _seconds_title(runs)}
    wanted = [("train", x, "loss", f"Training loss against {axes[x]}", axes[x]) for x in axes]
    if reference and sizes.size:
        title = f"Training loss minus that of {reference.name}"
        wanted.insert(1, ("train", "step", "difference", title, "step"))
    elsewhere = {*chart_data.AXES, "difference"}
    for split, words in (("eval", "Evaluation"), ("train", "Training")):
        wanted += [
            (split, "step", name, f"{words}: {name.replace('_', ' ')}", "step")
            for name in splits.get(split, {})
            if name not in elsewhere and (split, name) != ("train", "loss")
        ]
    return [
        curve(split, x, y, *titles)
        for split, x, y, *titles in wanted
        if all(np.isfinite(np.array(splits[split][field], float)).any() for field in (x, y))
    ]


def _both_signs(sizes: np.ndarray) -> dict[str, Any]:
    """An axis for values of these sizes, logarithmic on both sides of zero."""
    low, high = math.floor(np.log10(sizes.min())), math.floor(np.log10(sizes.max()))
    powers = [10.0**power for power in range(high, low - 1, -math.ceil((high - low + 1) / 3))]
    ticks = [*(-power for power in powers), 0.0, *powers]
    scale = alt.Scale(type="symlog", constant=10.0**low, padding=8)
    return {"scale": scale, "axis": alt.Axis(values=ticks, format="~g")}


def _seconds_title(runs: Sequence[Run]) -> str:
    platforms = {run.platform for run in runs if run.platform}
    if platforms == {"cpu"}:
        return "seconds (CPU)"
    return "seconds (of other devices)" if len({run.devices for run in runs}) > 1 else "seconds"


def _bars(
    charts: Charts,
    name: str,
    parts: Mapping[str, Mapping[str, float | None]],
    title: str,
    axis: str,
    unit: float = 1.0,
) -> list[alt.Chart]:
    """Bars of parts, run -> part -> size; no chart if no size is known.

    Parts are shades of grey: colours are those of runs.
    """
    sizes = [
        (run, part, size / unit)
        for run, sizes in parts.items()
        for part, size in sizes.items()
        if size
    ]
    if not sizes:
        return []
    columns = as_columns(("run", "part", "size"), sizes)
    kinds = list(dict.fromkeys(columns["part"]))
    shares = np.linspace(85, 25, len(kinds))
    shades = [f"color-mix(in srgb, var(--ink) {share:.0f}%, var(--page))" for share in shares]
    scale = alt.Scale(domain=kinds, range=shades)
    color = alt.Color("part", type="nominal", scale=scale, legend=legend_of(kinds))
    x = alt.X("size", type="quantitative", title=axis)
    tooltip = ["run:N", "part:N", "size:Q"]
    return [charts.bars(charts.data(name, columns), x, title, tooltip, color)]


def _front(charts: Charts, runs: Sequence[Run]) -> list[alt.TopLevelMixin]:
    """Loss for the bytes; no chart if neither is known."""
    front, loss = chart_data.front(runs)
    if not front["run"]:
        return []
    sent, losses = _around(front["sent"]), _around(front["loss"])
    encoded = alt.Chart(charts.data("front", front)).encode(
        x=alt.X("sent", type="quantitative", title="GB sent per device", scale=sent),
        y=alt.Y("loss", type="quantitative", title=loss, scale=losses),
    )
    line = encoded.transform_filter("datum.best").mark_line(
        interpolate="step-after", opacity=0.4, color="currentColor", strokeDash=[4, 3]
    )
    look = charts.look(front["run"])
    points = encoded.mark_point(filled=True, size=90, opacity=1).encode(
        color=look["color"], shape=look["shape"], tooltip=["run:N", "sent:Q", "loss:Q"]
    )
    title = f"Last {loss} against the bytes sent; dashed: the best trade-offs"
    return [alt.layer(line, points, description=title)]


def _around(values: Sequence[float]) -> alt.Scale:
    """An axis for these values, on which those that differ by rounding are close together."""
    low, high = min(values), max(values)
    room = max(high - low, abs(high)) / 20
    return alt.Scale(domain=[low and low - room, high + room])


def _links(charts: Charts, links: LinkTimes) -> list[alt.Chart]:
    """The predicted time by the speed of the slowest link, which a slider sets."""
    times = [
        (run, rate, 1e3 * seconds)
        for run, of_rates in links.seconds.items()
        for rate, seconds in enumerate(of_rates)
    ]
    data = charts.data("links", as_columns(("run", "rate", "ms"), times))
    speeds = [_speed(rate) + " (its own)" * (rate == links.own) for rate in links.rates]
    slider = alt.binding_range(min=0, max=len(speeds) - 1, step=1, name="Speed of the slowest link")
    chosen = alt.param(name="link", value=list(links.rates).index(links.own), bind=slider)
    x = alt.X("ms", type="quantitative", title="predicted ms of a step")
    bars = charts.bars(data, x, "", ["run:N", "ms:Q"])
    speed = alt.Title(alt.expr(f"{json.dumps(speeds)}[link]"))
    return [bars.properties(title=speed).add_params(chosen).transform_filter("datum.rate == link")]


def _speed(rate: float) -> str:
    """Bits a second in words."""
    unit, name = next((unit for unit in _UNITS if rate >= unit[0]), _UNITS[-1])
    return f"{rate / unit:.4g} {name}"
