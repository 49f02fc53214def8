"""Records of runs as columns, for charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from research_dp.comparison.runs import Run
from research_dp.html_charts import as_columns

AXES = ("run", "step", "sent", "seconds")
_MOST_POINTS = 30_000  # of all curves together, so that a page stays small
_LEAST_POINTS = 40  # of each curve


def curves(runs: Sequence[Run], split: str, reference: Run | None = None) -> dict[str, list[Any]]:
    """The records of all runs as columns, thinned out where they are too many.

    Training records have the column `difference`: the loss minus that of the reference.
    """
    most = max(_LEAST_POINTS, _MOST_POINTS // max(1, len(runs)))
    known = {name for run in runs for name in run.records.get(split, {})}
    names: list[str] = [x for x in ("loss", "grad_norm", "learning_rate") if x in known]
    names += ["difference"] * (split == "train")
    if split == "eval":
        names = sorted(known - {"step", "eval_seconds"})
    columns: dict[str, list[Any]] = {x: [] for x in (*AXES, *names)}
    for run in runs:
        steps = run.column(split, "step")
        values = {name: run.column(split, name) for name in names}
        if split == "train":
            values["difference"] = _difference(run, reference)
        found = [column for column in values.values() if len(column)]
        kept = _thinned(found, len(steps), most) if len(steps) > most else slice(None)
        values["run"] = np.full(len(steps), run.name)
        values["step"] = steps.astype(int)
        values["sent"] = steps * (run.wire.total / 1e9 if run.wire else np.nan)
        values["seconds"] = _seconds_at(run, steps)
        unknown = np.full(len(steps), np.nan)
        for name, column in values.items():
            columns[name] += (column if len(column) else unknown)[kept].tolist()
    return columns


def _difference(run: Run, reference: Run | None) -> np.ndarray:
    """The training loss minus that of the reference at the same step; empty for the reference."""
    if reference is None or run is reference:
        return np.zeros(0)
    expected, found = (
        zip(*(one.column("train", x).tolist() for x in ("step", "loss")), strict=False)
        for one in (reference, run)
    )
    losses = dict(expected)
    return np.array([loss - losses.get(step, np.nan) for step, loss in found])


def _thinned(columns: Sequence[np.ndarray], count: int, most: int) -> np.ndarray:
    """Places of at most so many records: extremes of each column in equal parts, and the ends."""
    parts = np.array_split(np.arange(count), max(1, (most - 2) // (2 * max(1, len(columns)))))
    places = [0, count - 1]
    for values in columns:
        known = np.isfinite(values)
        finite = np.where(known, values, values[known].max(initial=0))
        places += [
            part[choose(finite[part])] for part in parts for choose in (np.argmin, np.argmax)
        ]
    return np.unique(places)


def _seconds_at(run: Run, steps: np.ndarray) -> np.ndarray:
    """The seconds of training steps until these steps, from the rates of the training records."""
    at, rates = run.column("train", "step"), run.column("train", "steps_per_second")
    if not len(rates) or np.isnan(rates).all():
        return np.full(len(steps), np.nan)
    rates = np.where(np.isnan(rates), np.nanmean(rates), rates)
    elapsed = np.cumsum(np.diff(at, prepend=0) / rates)
    return np.interp(steps, np.concatenate([[0], at]), np.concatenate([[0], elapsed]))


def front(runs: Sequence[Run]) -> tuple[dict[str, list[Any]], str]:
    """Bytes sent and last loss of each run, by bytes; whether none has less of both; which loss."""
    known = [run for run in runs if run.gigabytes_sent is not None]
    split = "train" if any(run.last("eval", "loss") is None for run in known) else "eval"
    points = [(run.gigabytes_sent, run.last(split, "loss"), run.name) for run in known]
    points = [point for point in points if point[1] is not None]
    rows: list[tuple[Any, ...]] = []
    best: tuple[Any, ...] = (np.inf, np.inf)  # loss, bytes
    for sent, loss, name in sorted(points, key=lambda point: point[:2]):
        best = min(best, (loss, sent))
        rows.append((name, sent, loss, int((loss, sent) == best)))
    title = "training loss" if split == "train" else "evaluation loss"
    return as_columns(("run", "sent", "loss", "best"), rows), title
