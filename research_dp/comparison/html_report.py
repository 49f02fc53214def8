"""A comparison as one HTML file: verdicts, configurations, curves, memory, bytes, time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from research_dp.comparison import chart_data, tables
from research_dp.comparison.comparison import Comparison
from research_dp.comparison.runs import Run
from research_dp.html_page import BAR, Page, legend_of

if TYPE_CHECKING:  # an extra, and slow to import
    import altair

_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"))
_MOST_MARKERS = 2_000  # of a chart
_SMOOTHED = 0.025  # the part of a curve, on each side, that its moving average includes


def page(comparison: Comparison) -> str:
    """The page: one file that opens from disk, and needs no other."""
    runs = [run for run in comparison.runs if run.is_run]
    shown = Page(comparison.title(), [run.name for run in runs], "run")
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
    data = {split: shown.data(split, columns) for split, columns in splits.items()}

    def curve(split: str, x: str, y: str, title: str, x_title: str = "step", **options: Any) -> Any:
        scale = alt.Scale(zero=False, nice=False, padding=8)
        records = len(splits[split]["run"])
        return shown.lines(
            data[split],
            alt.X(x, type="quantitative", title=x_title, scale=scale),
            y,
            title,
            tooltip=["run:N", f"{x}:Q", f"{y}:Q"],
            smoothed=int(_SMOOTHED * records / len(runs)),
            markers=records <= _MOST_MARKERS,
            **options,
        )

    train = splits["train"]
    axes = {"step": "step", "sent": "GB sent per device", "seconds": _seconds_title(runs)}
    charts = [
        curve("train", x, "loss", f"Training loss against {title}", title, log=False)
        for x, title in axes.items()
        if _is_known(train[x]) and _is_known(train["loss"])
    ]
    sizes = np.abs(np.array(train["difference"], float))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if reference and sizes.size:
        title = f"Training loss minus that of {reference.name}"
        charts.insert(1, curve("train", "step", "difference", title, **_both_signs(sizes)))
    elsewhere = {*chart_data.AXES, "difference"}
    for split, title in (("eval", "Evaluation"), ("train", "Training")):
        for name, column in splits.get(split, {}).items():
            has_chart = name in elsewhere or (split, name) == ("train", "loss")
            if not has_chart and _is_known(column):
                head = f"{title}: {name.replace('_', ' ')}"
                charts.append(curve(split, "step", name, head, log=False))
    shown.charts(*charts)


def _is_known(column: Sequence[float | None]) -> bool:
    """Whether a column has a number."""
    return bool(np.isfinite(np.array(column, float)).any())


def _both_signs(sizes: np.ndarray) -> dict[str, Any]:
    """An axis for values of these sizes, logarithmic on both sides of zero."""
    import altair as alt

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
            x=alt.X("size", type="quantitative", title=axis, stack="zero"),
            color=alt.Color("part", type="nominal", scale=colors, legend=legend_of(kinds)),
            tooltip=["run:N", "part:N", "size:Q"],
        )
        .properties(title=title, height=BAR * len(parts))
    )


def _add_memory(shown: Page, comparison: Comparison, runs: Sequence[Run]) -> None:
    shown.heading("Memory per device")
    parts = {run.name: tables.memory_parts(run) for run in runs}
    if any(size for sizes in parts.values() for size in sizes.values()):
        scaled = _scaled(parts, 1e6)
        shown.charts(_bars(shown, "memory", scaled, "As the run compiled it", "MB"))
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
        shown.charts(*charts)
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
        shown.charts(_bars(shown, "seconds_of", parts, title, "seconds"))
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
        base = alt.Chart(shown.data("front", front))
        encoded = base.encode(
            x=alt.X("sent", type="quantitative", title="GB sent per device", scale=nice),
            y=alt.Y("loss", type="quantitative", title=loss, scale=nice),
        )
        line = encoded.transform_filter("datum.best").mark_line(
            interpolate="step-after", opacity=0.4, color="currentColor", strokeDash=[4, 3]
        )
        points = encoded.mark_point(filled=True, size=90, opacity=1).encode(
            tooltip=["run:N", "sent:Q", "loss:Q"],
            **shown.look("color", "shape", legend=front["run"]),
        )
        title = f"Last {loss} against the bytes sent; dashed: no run has less of both"
        shown.charts(alt.layer(line, points, title=title))
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
        columns["rate"] += range(len(seconds))
        columns["ms"] += [1e3 * x for x in seconds]
    speeds = [_speed(rate) + " (its own)" * (rate == links.own) for rate in links.rates]
    slider = alt.binding_range(min=0, max=len(speeds) - 1, step=1, name="Speed of the slowest link")
    own = list(links.rates).index(links.own)
    x = alt.X("ms", type="quantitative", title="predicted ms of a step")
    speed = alt.Title(alt.expr(f"{json.dumps(speeds)}[link]"))
    bars = shown.bars(shown.data("links", columns), x, speed, ["run:N", "ms:Q"])
    chosen = alt.param(name="link", value=own, bind=slider)
    shown.charts(bars.add_params(chosen).transform_filter("datum.rate == link"))


def _speed(rate: float) -> str:
    """Bits a second in words."""
    unit, name = next((unit for unit in _UNITS if rate >= unit[0]), _UNITS[-1])
    return f"{rate / unit:.4g} {name}"
