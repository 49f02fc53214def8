"""A comparison as tables: verdicts, configurations, progress, memory, bytes, time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from research_dp.comparison.differences import Setting
from research_dp.comparison.runs import Run
from research_dp.comparison.verdicts import Verdict
from research_dp.console import Table, table
from research_dp.planning.row import Row
from research_dp.planning.tables import format_number, scale

WORDS = {
    "bits": "the same bits",
    "rounding": "the same within rounding",
    "design": "another algorithm by design",
    "varied": "varied on purpose",
    "unknown": "not known",
    "differs": "differs",
}
STYLES = {"bits": "green", "rounding": "green", "differs": "bold red", "unknown": "yellow"}
ROLES = {
    "other": "Differs, and should not",
    "version": "Made by other code",
    "varied": "Varied on purpose",
    "strategy": "Differs as the strategies do",
}
_STATES = {"done": "green", "died": "bold red", "no run": "bold red", "running": "yellow"}
_MOST_NAMED = 2  # runs of a value that most have
_BYTES = {
    "params": "parameters",
    "gradients": "gradients",
    "opt_state": "optimizer",
    "model_state": "model state",
}


def verdict_table(runs: Sequence[Run], reference: Run, verdicts: Mapping[str, Verdict]) -> Table:
    """The verdict of each run against the reference, and each state that is not 'done'."""
    shown = table(f"Compared with {reference.name}", "run", "verdict", "why~")
    for run in runs:
        why = [run.status.message] if run.status.state != "done" else []
        words = Text("reference" if run is reference else "")
        if verdict := verdicts.get(run.name):
            words = Text(WORDS[verdict.kind], STYLES.get(verdict.kind, ""))
            why = [message for message in why if message not in verdict.message]
            why.append(verdict.message)
        shown.add_row(run.name, words, "; ".join(why))
    return shown


def pairs_table(runs: Sequence[Run], verdicts: Sequence[Verdict]) -> Table | None:
    """The verdict of each pair as a matrix; None where not all were compared, or there is one."""
    kinds = {(v.a, v.b): v.kind for v in verdicts} | {(v.b, v.a): v.kind for v in verdicts}
    names = [run.name for run in runs]
    if len(names) < 3 or len(kinds) < len(names) * (len(names) - 1):
        return None
    shown = table("Each pair", "run", *names)
    for a in names:
        cells = (kinds.get((a, b), "") for b in names)
        shown.add_row(a, *(Text(kind, STYLES.get(kind, "")) for kind in cells))
    return shown


def settings_tables(settings: Sequence[Setting]) -> Iterator[Table]:
    """What differs: what should not, what was varied on purpose, what the strategies bind."""
    for role, title in ROLES.items():
        found = [setting for setting in settings if setting.role == role]
        shown = table(title, "what", "value", "bound in", "runs~", grouped=True)
        for setting in found:
            # Runs that share a value share a line.
            alike: dict[tuple[str, str], list[str]] = {}
            for run, value in setting.values.items():
                alike.setdefault((value, setting.places.get(run, "")), []).append(run)
            style = {"other": "bold red", "version": "red"}.get(role, "")
            most = max(alike.values(), key=len)
            for (value, place), runs in alike.items():
                is_rest = runs is most and len(runs) > _MOST_NAMED
                named = f"the other {len(runs)}" if is_rest else ", ".join(runs)
                shown.add_row(Text(setting.name, style), value, place, named)
        if found:
            yield shown


def run_table(runs: Sequence[Run], metrics: Sequence[str]) -> Table:
    """Progress, loss, metrics of the evaluation, and speed of each run."""
    heads = ("step:", "loss:", *(f"eval {name}:" for name in metrics), "steps/s:", "timed on")
    shown = table("Runs", "run", "strategy", "state", *heads)
    for run in runs:
        state = Text(run.status.state, _STATES.get(run.status.state, ""))
        numbers = [run.last("train", "loss"), *(run.last("eval", name) for name in metrics)]
        speed = run.summary.get("steps_per_second") or run.last("train", "steps_per_second")
        cells = [format_number(number, 1, ".4g") for number in (*numbers, speed)]
        step = str(run.step) if run.is_run else ""
        mark = run.platform.upper() if cells[-1] else ""
        shown.add_row(run.name, run.strategy, state, step, *cells, mark)
    return shown


def memory_parts(run: Run) -> dict[str, float | None]:
    """What a device stores, in bytes, as the run compiled it."""
    state, program = (run.facts.get(key) or {} for key in ("bytes_per_device", "program"))
    parts = {label: state.get(key) for key, label in _BYTES.items()}
    if temporary := program.get("temp_bytes"):
        # The program's temporary buffers include the gradients.
        parts["other temporary"] = max(0, temporary - (state.get("gradients") or 0))
    return parts


def memory_table(runs: Sequence[Run], planned: Mapping[str, Row], topology: str) -> Table:
    """Bytes of each device: of the state, of the program, planned, measured."""
    sizes = [
        {
            **memory_parts(run),
            "needed": (run.facts.get("program") or {}).get("needed_bytes"),
            "measured": run.peak_memory,
            f"needed on {topology}": row.needed_bytes if (row := planned.get(run.name)) else None,
        }
        for run in runs
    ]
    unit, name = scale(size for one in sizes for size in one.values())
    known = dict.fromkeys(key for one in sizes for key, size in one.items() if size is not None)
    shown = table(f"Memory per device in {name}", "run", *(f"{key}:" for key in known))
    for run, one in zip(runs, sizes, strict=True):
        cells = (format_number(one.get(key), unit, ",.3f") for key in known)
        shown.add_row(run.name, *cells)
    return shown


def wire_table(runs: Sequence[Run]) -> Table:
    """Bytes that a device sends in a step by kind of collective, and has sent so far."""
    unit, name = scale(run.wire.total if run.wire else None for run in runs)
    kinds = sorted({kind for run in runs if run.wire for kind in run.wire.by_kind})
    heads = ("a step:", *(f"{kind}:" for kind in kinds), "GB so far:")
    shown = table(f"Wire bytes that a device sends, in {name}", "run", *heads)
    for run in runs:
        sizes: list[float | None] = [None] * (1 + len(kinds))
        if run.wire:
            sizes = [run.wire.total, *(run.wire.by_kind.get(kind, 0.0) for kind in kinds)]
        cells = (format_number(size, unit, ",.3f") for size in sizes)
        shown.add_row(run.name, *cells, format_number(run.gigabytes_sent, 1, ",.3g"))
    return shown


def plan_table(planned: Mapping[str, Row], topology: str, is_timed: bool) -> Table:
    """What a step is predicted to send and, if `is_timed`, to take on some devices, by run."""
    unit, name = scale(row.wire_total for row in planned.values())
    problems = ["problem~"] if any(row.problem for row in planned.values()) else []
    times = ["step ms:", "exposed ms:"] if is_timed else []
    heads = (f"wire {name}:", "expected:", "overlapped:", *times, *problems)
    shown = table(f"Planned for {topology}", "run", *heads)
    for run, row in planned.items():
        exposed = (row.predicted_parts or {}).get("exposed")
        figures = (
            *((row.wire_total, unit, ",.3f"), (row.min_wire_bytes, unit, ",.3f")),
            (row.hidden_fraction, 1, ".0%"),
            *((row.predicted_seconds, 1e-3, ".3g"), (exposed, 1e-3, ".3g"))[: len(times)],
        )
        cells = [format_number(*figure) for figure in figures]
        shown.add_row(run, *cells, *(row.problem or "" for _ in problems))
    return shown


def seconds_table(runs: Sequence[Run]) -> Table:
    """Where the time of each run went."""
    keys = dict.fromkeys(key for run in runs for key in run.seconds)
    shown = table(
        "Seconds of the training process", "run", *(f"{key}:" for key in keys), "timed on"
    )
    for run in runs:
        cells = (format_number(run.seconds.get(key), 1, ",.1f") for key in keys)
        shown.add_row(run.name, *cells, run.platform.upper())
    return shown


def provenance_table(runs: Sequence[Run]) -> Table:
    """Date, devices and commit of each start of each run."""
    columns = ("run", "started", "at step:", "devices", "processes:", "commit", "folder")
    shown = table("Each start of each run", *columns, grouped=True)
    for run in runs:
        for start in run.facts.get("starts") or [{}]:
            count, kind = start.get("devices"), start.get("device_kind", "")
            shown.add_row(
                run.name,
                str(start.get("time", "")),
                str(start.get("step", "")),
                f"{count} x {kind}" if count else "",
                str(start.get("processes", "")),
                str(start.get("commit") or "not known"),
                str(run.folder),
            )
    return shown


def command_table(runs: Sequence[Run]) -> Table:
    """Command and versions of each start of each run."""
    shown = table("", "run", "command~", "versions~", grouped=True)
    for run in runs:
        for start in run.facts.get("starts") or ():
            versions = {"python": start.get("python"), **(start.get("versions") or {})}
            known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
            shown.add_row(run.name, str(start.get("command", "")), known)
    return shown
