"""A comparison as one HTML file: verdicts, configurations, curves, memory, bytes, time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from research_dp.comparison import chart_data, tables
from research_dp.comparison.comparison import Comparison
from research_dp.comparison.runs import Run
from research_dp.html_page import Page, Slider

if TYPE_CHECKING:  # an extra, and slow to import
    import altair

_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"))
_MOST_MARKERS = 2_000  # of a chart
_HEIGHT, _BAR = 260, 24


def page(comparison: Comparison) -> str:
    """The page: one file that opens from disk, and needs no other."""
    runs = [run for run in comparison.runs if run.is_run]
    shown = Page(comparison.title(), [run.name for run in runs])
    shown.bullets(comparison.notes())
    shown.heading("Verdict per pair")
    if comparison.reference is not None:
        shown.table(
            tables.verdict_table(comparison.runs, comparison.reference, comparison.of_reference)
        )
    if pairs := tables.pairs_table(comparison.runs, comparison.verdicts):
        shown.table(pairs)
    shown.heading("Configuration difference")
    for part in tables.settings_tables([s for s in comparison.settings if s.role != "strategy"]):
        shown.table(part)
    of_strategy = [s for s in comparison.settings if s.role == "strategy"]
    if of_strategy:
        with shown.details(f"{len(of_strategy)} parameters differ as the strategies do"):
            for part in tables.settings_tables(of_strategy):
                shown.table(part)
    if not comparison.settings:
        shown.prose("Nothing differs.")
    shown.heading("Progress")
    shown.table(tables.run_table(comparison.runs, comparison.eval_metrics))
    _add_curves(shown, runs, comparison.reference)
    _add_memory(shown, comparison, runs)
    _add_wire(shown, comparison, runs)
    _add_seconds(shown, comparison, runs)
    _add_front(shown, comparison, runs)
    shown.heading("Provenance")
    shown.table(tables.provenance_table(runs))
    with shown.details("Commands and versions"):
        shown.table(tables.command_table(runs))
    return shown.text()


def _add_curves(shown: Page, runs: Sequence[Run], reference: Run | None) -> None:
    """Loss against steps, bytes and seconds, and minus the reference's; evaluation; norm."""
    import altair as alt

    shown.heading("Loss, evaluation, gradient norm")
    # One evaluation alone is no curve: the table above has it.
    splits = {
        split: chart_data.curves(runs, split, reference)
        for split, least in (("train", 1), ("eval", 2))
        if any(len(run.column(split, "step")) >= least for run in runs)
    }
    if "train" not in splits:
        shown.prose("No run has a record yet.")
        return
    if any(run.platform == "cpu" for run in runs):
        shown.prose("Seconds are those of training steps, and marked CPU where a CPU took them.")
    curves: dict[str, Callable[..., Any]] = {}
    for split, columns in splits.items():
        metrics = [name for name in columns if name not in chart_data.AXES]
        chart = alt.Chart(shown.data(split, columns, series="run", smoothed=metrics))
        has_points = len(columns["run"]) <= _MOST_MARKERS
        curves[split] = functools.partial(_curve, shown, chart, has_points=has_points)
    axes = {"step": "step", "sent": "GB sent per device", "seconds": _seconds_title(runs)}
    charts = [
        curves["train"](x, "loss", f"Training loss against {title}", title)
        for x, title in axes.items()
        if not np.isnan(np.array(splits["train"][x], float)).all()
    ]
    sizes = np.abs(np.array(splits["train"]["difference"], float))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if reference and sizes.size:
        charts.insert(1, _difference(curves["train"], sizes, reference))
    for split, title in (("eval", "Evaluation"), ("train", "Training")):
        for name in splits.get(split, {}):
            if name not in (*chart_data.AXES, "difference") and (split, name) != ("train", "loss"):
                head = f"{title}: {name.replace('_', ' ')}"
                charts.append(curves[split]("step", name, head, "step"))
    shown.charts(*charts, y_scale="linear", smoothing=True)


def _difference(curve: Callable[..., Any], sizes: np.ndarray, reference: Run) -> Any:
    """Loss minus the reference's by steps: signs stay, and sizes are logarithmic."""
    import altair as alt

    low, high = math.floor(np.log10(sizes.min())), math.floor(np.log10(sizes.max()))
    powers = [10.0**power for power in range(high, low - 1, -math.ceil((high - low + 1) / 3))]
    ticks = [*(-power for power in powers), 0.0, *powers]
    scale = alt.Scale(type="symlog", constant=10.0**low)
    axis = alt.Axis(values=ticks, format="~g")
    title = f"Training loss minus that of {reference.name}"
    return curve("step", "difference", title, "step", scale=scale, axis=axis)


def _seconds_title(runs: Sequence[Run]) -> str:
    platforms = {run.platform for run in runs if run.platform}
    if platforms == {"cpu"}:
        return "seconds (CPU)"
    return "seconds (of other devices)" if len({run.devices for run in runs}) > 1 else "seconds"


def _curve(
    shown: Page,
    chart: altair.Chart,
    x: str,
    y: str,
    title: str,
    x_title: str,
    *,
    has_points: bool,
    **y_options: Any,
) -> Any:
    import altair as alt

    nice = alt.Scale(zero=False, nice=False)
    y_options = {"scale": alt.Scale(zero=False), **y_options}
    tooltip = ["run:N", f"{x}:Q", f"{y}:Q"]
    base = chart.encode(
        x=alt.X(x, type="quantitative", title=x_title, scale=nice),
        y=alt.Y(y, type="quantitative", title=y.replace("_", " "), **y_options),
        color=shown.color("run"),
    )
    line = base.mark_line().encode(strokeDash=shown.dash("run"))
    if not has_points:
        return line.properties(title=title, height=_HEIGHT)
    # One record alone makes no line, and a line has no tooltip.
    points = base.mark_point(size=14, filled=True, opacity=0.7).encode(tooltip=tooltip)
    return alt.layer(line, points, title=title, height=_HEIGHT)


def _bars(
    shown: Page,
    name: str,
    parts: Mapping[str, Mapping[str, float | None]],
    title: str,
    axis: str,
) -> altair.Chart:
    """Stacked bars: run -> part -> size. Parts are shades of grey: colours are those of runs."""
    import altair as alt

    rows = [
        (run, part, size) for run, sizes in parts.items() for part, size in sizes.items() if size
    ]
    kinds = list(dict.fromkeys(part for _, part, _ in rows))
    columns: dict[str, list[Any]] = {"run": [], "part": [], "size": []}
    for run, part, size in rows:
        columns["run"].append(run)
        columns["part"].append(part)
        columns["size"].append(size)
    shares = np.linspace(85, 25, len(kinds))
    shades = [f"color-mix(in srgb, var(--ink) {share:.0f}%, var(--page))" for share in shares]
    colors = alt.Scale(domain=kinds, range=shades)
    return (
        alt.Chart(shown.data(name, columns))
        .mark_bar()
        .encode(
            y=alt.Y("run", type="nominal", sort=list(parts), title=None),
            x=alt.X(
                "size", type="quantitative", title=axis, stack="zero", axis=alt.Axis(tickCount=8)
            ),
            color=alt.Color(
                "part", type="nominal", scale=colors, legend=alt.Legend(orient="top", title=None)
            ),
            tooltip=["run:N", "part:N", "size:Q"],
        )
        .properties(title=title, height=_BAR * len(parts))
    )


def _add_memory(shown: Page, comparison: Comparison, runs: Sequence[Run]) -> None:
    shown.heading("Memory per device")
    parts = {run.name: tables.memory_parts(run) for run in runs}
    if any(size for sizes in parts.values() for size in sizes.values()):
        scaled = _scaled(parts, 1e6)
        shown.charts(_bars(shown, "memory", scaled, "As the run compiled it", "MB"), legend=False)
    shown.table(tables.memory_table(runs, comparison.planned, comparison.topology))
    if not any(run.peak_memory for run in runs):
        shown.prose("No device reported the memory that it used; CPUs do not.")


def _add_wire(shown: Page, comparison: Comparison, runs: Sequence[Run]) -> None:
    shown.heading("Wire bytes of a step")
    charts = []
    for key, title in (("by_kind", "By kind of collective"), ("by_axis", "By mesh axis")):
        parts = {run.name: dict(getattr(run.wire, key)) if run.wire else {} for run in runs}
        if any(parts.values()):
            charts.append(_bars(shown, key, _scaled(parts, 1e6), title, "MB a device and step"))
    if charts:
        shown.charts(*charts, legend=False)
    shown.table(tables.wire_table(runs))
    if comparison.planned:
        shown.table(tables.plan_table(comparison.planned, comparison.topology, comparison.is_timed))
    else:
        shown.prose(
            "The least that must be sent, and what is hidden behind compute, are known with "
            "--topology=T."
        )


def _add_seconds(shown: Page, comparison: Comparison, runs: Sequence[Run]) -> None:
    shown.heading("Where the time goes")
    parts = {
        f"{run.name} (CPU)" if run.platform == "cpu" else run.name: {
            name: seconds for name, seconds in run.seconds.items() if name != "total"
        }
        for run in runs
    }
    if any(parts.values()):
        title = "Seconds of the training process"
        shown.charts(_bars(shown, "seconds_of", parts, title, "seconds"), legend=False)
        shown.table(tables.seconds_table(runs))
    else:
        shown.prose("No run recorded it yet.")


def _scaled(
    parts: Mapping[str, Mapping[str, float | None]], unit: float
) -> dict[str, dict[str, float | None]]:
    return {
        run: {name: size / unit if size else None for name, size in sizes.items()}
        for run, sizes in parts.items()
    }


def _add_front(shown: Page, comparison: Comparison, runs: Sequence[Run]) -> None:
    """Loss for the bytes, and the predicted time by the speed of the slowest link."""
    import altair as alt

    shown.heading("Loss for the bytes")
    front, loss = chart_data.front(runs)
    if front["run"]:
        nice = alt.Scale(zero=False)
        base = alt.Chart(shown.data("front", front, series="run"))
        encoded = base.encode(
            x=alt.X("sent", type="quantitative", title="GB sent per device", scale=nice),
            y=alt.Y("loss", type="quantitative", title=loss, scale=nice),
        )
        line = encoded.transform_filter("datum.best").mark_line(
            interpolate="step-after", opacity=0.4, color="currentColor", strokeDash=[4, 3]
        )
        points = encoded.mark_point(filled=True, size=90, opacity=1).encode(
            color=shown.color("run"),
            shape=shown.shape("run"),
            tooltip=["run:N", "sent:Q", "loss:Q"],
        )
        title = f"Last {loss} against the bytes sent; dashed: no run has less of both"
        layers: Any = alt.layer(line, points, title=title, height=_HEIGHT)
        shown.charts(layers)
    if comparison.topology and not comparison.is_timed:
        return  # a note says why
    shown.heading("Predicted time by the speed of the link", level=3)
    links = comparison.links
    if links is None or not links.seconds:
        shown.prose("Predicted times by the speed of the link are known with --topology=T.")
        return
    shown.prose(
        f"Predicted for {comparison.topology}, whose own slowest link has "
        f"{_speed(links.own)} per device. The other speeds replace that link alone."
    )
    columns: dict[str, list[Any]] = {"run": [], "rate": [], "ms": []}
    for name, seconds in links.seconds.items():
        columns["run"] += [name] * len(seconds)
        columns["rate"] += list(map(float, links.rates))
        columns["ms"] += [1e3 * x for x in seconds]
    chosen = alt.param(name="link", value=float(links.own))
    predicted = (
        alt.Chart(shown.data("links", columns, series="run"))
        .mark_bar()
        .encode(
            y=alt.Y("run", type="nominal", sort=None, title=None),
            x=alt.X("ms", type="quantitative", title="predicted ms of a step"),
            color=shown.color("run"),
            tooltip=["run:N", "ms:Q"],
        )
        .add_params(chosen)
        .transform_filter("datum.rate == link")
        .properties(title="Compute, and the wait for the network", height=_BAR * len(links.seconds))
    )
    slider = Slider(
        "link",
        "Speed of the slowest link",
        links.rates,
        [_speed(rate) + " (its own)" * (rate == links.own) for rate in links.rates],
        list(links.rates).index(links.own),
    )
    shown.charts(predicted, legend=False, slider=slider)


def _speed(rate: float) -> str:
    """Bits a second in words."""
    unit, name = next((unit for unit in _UNITS if rate >= unit[0]), _UNITS[-1])
    return f"{rate / unit:.4g} {name}"
