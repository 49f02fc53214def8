"""A plan as tables: memory, a step's wire bytes and time, collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from research_dp.analysis.topologies import Topology
from research_dp.console import Table, table
from research_dp.distributed.mesh import sizes_text
from research_dp.planning.row import Curves, Row

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_BOUND_CELLS = {"network inside": "intra-node", "network across": "inter-node"}


def tables(rows: Sequence[Row], where: Topology, *, verbose: bool = False) -> list[Table]:
    """Memory, and a step's wire bytes and time; `verbose`: all figures, and the collectives."""
    sent = scale(row.wire_total or row.min_wire_bytes for row in rows)
    short = [_memory_table(rows, where, verbose), _step_table(rows, where, *sent, verbose)]
    return [*short, _collectives_table(rows, *sent)] if verbose else short


def _memory_table(rows: Sequence[Row], where: Topology, verbose: bool) -> Table:
    unit, name = scale(row.needed_bytes or row.state_bytes for row in rows)
    limit = max((row.available_bytes or 0 for row in rows), default=0)
    at_most = f", at most {limit / unit:,.3f}" if limit else ""
    parts = {"params": "parameters:", "opt": "optimizer:", "slots": "slots:"}
    parts |= {"batch": "batch:", "temp": "temporary:"}
    if not any(row.slots_bytes for row in rows):
        del parts["slots"]
    if not verbose:
        del parts["batch"]
    axes = next((tuple(row.mesh) for row in rows if row.mesh), ())
    shown = table(
        f"Memory per device in {name}{at_most} ({where.memory_budget()[1]})",
        *("strategy", " x ".join(axes) or "mesh", *parts.values(), "needed:", "fits"),
    )
    for row in rows:
        mesh = " x ".join(map(str, row.mesh.values())) if row.mesh else ""
        if tuple(row.mesh or axes) != axes:
            mesh = sizes_text(row.mesh or {})
        sizes = (getattr(row, f"{part}_bytes") for part in (*parts, "needed"))
        cells = (format_number(size, unit, ",.3f") for size in sizes)
        shown.add_row(row.strategy, mesh, *cells, _fits(row))
    return shown


def _step_table(
    rows: Sequence[Row], where: Topology, unit: float, name: str, verbose: bool
) -> Table:
    """Times of CPUs are left out, unless verbose or measured."""
    timed = verbose or where.chip.platform != "cpu"
    counted = verbose or not timed

    def part(of: str) -> list[str]:
        return [format_number((row.predicted_parts or {}).get(of), 1e-3, ".2f") for row in rows]

    def rates(form: str, figure: str, unit: float = 1) -> list[str]:
        return [format_number(getattr(row, figure), unit, form) for row in rows]

    has_model = any(row.wire_of_model for row in rows)
    has_branches = any(row.wire_in_branches for row in rows)
    counts = [
        str(sum(total.count for total in row.collectives)) if row.collectives else ""
        for row in rows
    ]
    predicted = zip(rates(".2f", "predicted_seconds", 1e-3), rows, strict=True)
    bounded = [f">= {ms}" if row.is_lower_bound else ms for ms, row in predicted]
    errors = [format_number(prediction_error(row), 1, "+.0%") for row in rows]
    is_wide = where.chip.platform != "cpu" and any(row.is_wide for row in rows)
    columns = [  # whether it is shown if a row has a cell, its head, the cells of all rows
        (True, "strategy", [row.strategy for row in rows]),
        (True, f"wire {name}:", rates(",.3f", "wire_total", unit)),
        (has_model, "of model:", rates(",.3f", "wire_of_model", unit)),
        (has_branches, "in branches:", rates(",.3f", "wire_in_branches", unit)),
        (counted, "expected:", rates(",.3f", "min_wire_bytes", unit)),
        (True, "ratio:", rates(".3f", "wire_ratio")),
        (is_wide, "in bf16:", rates(",.3f", "narrow_wire_bytes", unit)),
        (counted, "collectives:", counts),
        (verbose, "overlapped:", rates(".0%", "hidden_fraction")),
        (verbose, "TFLOP:", rates(".4g", "flops", 1e12)),
        (verbose, "compute ms:", part("compute")),
        (verbose, "memory ms:", part("memory")),
        (verbose, "intra-node ms:", part("network_inside")),
        (verbose, "inter-node ms:", part("network_across")),
        (timed, "step ms:", bounded),
        (timed, "range ms:", [_range(row) for row in rows]),
        (True, "measured ms:", rates(".2f", "measured_seconds", 1e-3)),
        (timed, "error:", errors),
        (timed, "exposed ms:", part("exposed")),
        (timed, "MFU:", rates(".1%", "mfu")),
        (timed, "bound", [_BOUND_CELLS.get(row.bound or "", row.bound or "") for row in rows]),
        (verbose, "tokens/s:", rates(",.0f", "tokens_per_second")),
        (verbose, "compiled in s:", rates(".0f", "compile_seconds")),
    ]
    source = "nominal rates" if where.chip.platform == "cpu" else "vendors' rates"
    if where.chip.calibration:
        source = "published steps"
    rate = f"; times follow from {source}" if timed else ""
    shown = {head: cells for is_shown, head, cells in columns if is_shown and any(cells)}
    cells = list(zip(*shown.values(), strict=True))
    return Table(f"A step: wire bytes that a device sends{rate}", tuple(shown), rows=cells)


def _range(row: Row) -> str:
    if row.predicted_range is None:
        return ""
    limits = (seconds * 1e3 for seconds in row.predicted_range)
    return "-".join(f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" for ms in limits)


def _collectives_table(rows: Sequence[Row], unit: float, name: str) -> Table:
    columns = ("strategy", "collective", "over", "dtype", "times:", f"wire {name}:")
    shown = table("Collectives per step", *columns, grouped=True)
    for row in rows:
        for total in row.collectives or ():
            purpose = f" (for {total.purpose})" if total.purpose != total.kind else ""
            sent = format_number(total.wire_bytes, unit, ",.4f")
            cells = (total.kind + purpose, total.axes, total.dtype, f"{total.count}", sent)
            shown.add_row(row.strategy, *cells)
    return shown


def size_table(curves: Curves, where: Topology) -> Table:
    """Each strategy's figures by number of devices."""
    rows = [row for curve in curves.values() for row in curve.values()]
    unit, name = scale(row.needed_bytes for row in rows)
    sent, sent_name = scale(row.wire_total for row in rows)
    times = ("step ms:", "exposed ms:") if where.chip.platform != "cpu" else ()
    columns = ("devices:", f"state {name}:", f"needed {name}:", "fits", f"wire {sent_name}:")
    shown = table(
        "By number of devices; each keeps its examples", "strategy", *columns, *times, grouped=True
    )
    for strategy, curve in curves.items():
        for devices, row in curve.items():
            exposed = (row.predicted_parts or {}).get("exposed")
            cells: list[str | Text] = [
                f"{devices:,}",
                format_number(row.state_bytes, unit, ",.3f"),
                format_number(row.needed_bytes, unit, ",.3f"),
                _fits(row),
                format_number(row.wire_total, sent, ",.3f"),
                format_number(row.predicted_seconds, 1e-3, ".2f"),
                format_number(exposed, 1e-3, ".2f"),
            ]
            shown.add_row(strategy, *cells[: len(columns) + len(times)])
    return shown


def _fits(row: Row) -> Text:
    problem = (row.problem or "").partition(":")[0]
    return Text("yes", "green") if row.fits else Text(problem, "red")


def prediction_error(row: Row) -> float | None:
    """By what part of the measured time the prediction is above it (below: negative)."""
    if not row.measured_seconds or row.predicted_seconds is None:
        return None
    return row.predicted_seconds / row.measured_seconds - 1


def scale(sizes: Iterable[int | float | None]) -> tuple[float, str]:
    """The unit in which the largest of these bytes is at least 0.1: (bytes, name)."""
    largest = max((size or 0 for size in sizes), default=0)
    return next((unit for unit in _UNITS if largest >= 0.1 * unit[0]), _UNITS[-1])


def format_number(value: float | None, unit: float, form: str) -> str:
    """A number in a unit; '' where it is unknown."""
    return "" if value is None else f"{value / unit:{form}}"
