"""Plans published training runs: predicted beside published step times, and the calibration.

python experiments/plan/published/plan.py [--only=ID] [--programs=DIR] [--fit]

Needs the extras `plan-gpu` and `plan-tpu`. Each row of `rows.json` becomes a file in `gin/`.
`--programs` keeps the compiled programs, which `--fit` needs: it prints the calibrations for
research_dp/distributed/hardware.toml, and the errors where each source in turn is left out.
"""

import argparse
import dataclasses
import json
import math
import statistics
from pathlib import Path

import numpy as np
from scipy.optimize import lsq_linear

import research_dp
from research_dp.analysis import hlo, hlo_collectives, topologies
from research_dp.analysis.program_cost import Timeline, link_rate
from research_dp.analysis.schedule import Schedule
from research_dp.distributed.mesh import chips

HERE = Path(__file__).parent
# Programs of rows that do not fit are not those that ran: the compiler recomputes to save memory.
LEFT_OUT = {"fms-h100-34b", "mpt-h100-30b-4096-8"}


def gin_text(row: dict) -> str:
    """The run of a row: its sizes, with collectives in bfloat16."""
    strategy, _, groups = row["strategy"].partition(" ")
    files = ["models/lm_1b", "data/random_tokens", "optim/adamw_cosine", f"strategies/{strategy}"]
    files += ["precision/bf16_collectives"] if row["devices"] > 1 else []
    lines = [
        f"# {row['id']}: see rows.json.",
        *(f"include 'gin/{name}.gin'" for name in files),
        "",
        "train.num_steps = 10000",
        f"train.batch_size = {row['micro'] * row['accumulation'] * row['devices']}",
        f"train.accumulation_steps = {row['accumulation']}",
        "train.max_grad_norm = 1.0",
        f"VOCAB_SIZE = {row['vocab']}",
        f"random_tokens.length = {row['length']}",
        f"transformer.vocab_size = {row['vocab']}",
        f"transformer.tied = {row['tied']}",
        *(f"transformer.{name} = {row[name]}" for name in ("width", "depth", "heads", "mlp_width")),
        f"transformer.remat = '{row['remat']}'",
    ]
    if groups:
        lines.append(f"make_mesh.axes = {{'data': -1, 'fsdp': {groups}}}")
    return "\n".join(lines) + "\n"


def topology_of(row: dict) -> str:
    """A TPU slice, or hosts of eight GPUs."""
    if row["device"].startswith("v"):
        return f"{row['device']}-{row['devices']}"
    inside = min(8, row["devices"])
    return f"{row['device']}:{row['devices'] // inside}x{inside}"


def planned(row: dict, programs: Path | None) -> dict:
    """The plan of a row; its program stays in a folder."""
    file = HERE / "gin" / f"{row['id']}.gin"
    file.parent.mkdir(exist_ok=True)
    file.write_text(gin_text(row))
    folder = programs and programs / row["id"]
    result = research_dp.plan([str(file)], topology=topology_of(row), dump_hlo=folder)
    (plan,) = result["strategies"].values()
    if folder:
        (folder / "mesh.json").write_text(json.dumps(plan["mesh"]))
    return plan


class Program:
    """The compiled program of a row, whose time depends on a calibration."""

    def __init__(self, row: dict, folder: Path):
        self.row, sizes = row, json.loads((folder / "mesh.json").read_text())
        self.entry = hlo.parse(next(folder.glob("*.txt")).read_text())
        self.where = topologies.topology(topology_of(row))
        self.devices = list(self.where.mesh(tuple(sizes.values()), tuple(sizes)).devices.flat)
        self.collectives = tuple(hlo_collectives.find_collectives(self.entry, sizes))
        # Seconds of matmuls, of attention, and of memory traffic that is beside neither.
        never = 1e12
        parts = ((1.0, never, 0.0), (never, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 1.0, 1.0))
        times = [self.at(numbers) for numbers in parts]
        matmul, attention, compute, total = (t.step - t.exposed - t.slowed for t in times)
        self.seconds = np.array([matmul, attention, total - compute]) / row["step_s"]

    def at(self, numbers: tuple[float, ...]) -> Schedule:
        """The predicted schedule with these shares: matmul, attention, memory."""
        shares = dict(zip(("matmul", "attention", "memory"), numbers, strict=True))
        known = dataclasses.replace(self.where.chip.calibration, **shares)
        where = dataclasses.replace(
            self.where, chip=dataclasses.replace(self.where.chip, calibration=known)
        )
        groups = {c.name: [self.devices[i] for i in c.group] for c in self.collectives}
        routes = {name: topologies.route(where, group) for name, group in groups.items()}
        return Timeline(self.entry, where, self.collectives, routes).at(link_rate(where))

    def error(self, numbers: tuple[float, ...]) -> float:
        """By what part of the published time the predicted one is above it."""
        return self.at(numbers).step / self.row["step_s"] - 1


def fitted(programs: list[Program]) -> dict[str, tuple[float, ...]]:
    """(matmul, attention, memory) by device: least squares, in which own rows count four times.

    GPUs have one number for attention and one for memory. Of TPUs there are too few rows for more
    than matmuls. What communication costs is taken from the calibrations that are there, and so is
    its slowing of compute: too few rows send much.
    """
    kinds = sorted({p.row["device"] for p in programs})
    rows, goals = [], []
    for p in programs:
        kind, weight = p.row["device"], 2.0 if p.row["id"].startswith("own") else 1.0
        now = p.where.chip.calibration
        waits = p.at((now.matmul, now.attention, now.memory))
        matmul, attention, memory = p.seconds
        goal = 1 - (waits.exposed + waits.slowed) / p.row["step_s"]
        if kind.startswith("v"):
            goal -= memory * now.memory
            memory = 0.0
        rows.append(np.array([attention, memory, *(matmul * (kind == k) for k in kinds)]) * weight)
        goals.append(goal * weight)
    least = np.array([1.0, 0.0, *[1.0] * len(kinds)])
    attention, memory, *matmuls = lsq_linear(np.array(rows), goals, (least, least + 10)).x
    found = {}
    for kind, matmul in zip(kinds, matmuls, strict=True):
        taken = chips()[kind].calibration.memory if kind.startswith("v") else memory
        found[kind] = (1 / matmul, 1 / attention, taken)
    return found


def fit(rows: list[dict], folder: Path) -> None:
    """Prints the calibrations, and the errors of rows that they were not fitted to."""
    programs = [Program(row, folder / row["id"]) for row in rows if row["id"] not in LEFT_OUT]
    for kind, numbers in fitted(programs).items():
        print(kind, [round(number, 3) for number in numbers], flush=True)
    errors = {}
    for source in sorted({p.row["id"].split("-")[0] for p in programs}):
        inside, outside = (
            [p for p in programs if p.row["id"].startswith(source) == is_it]
            for is_it in (True, False)
        )
        known = fitted(outside)
        for p in inside:
            if p.row["device"] in known:
                errors[p.row["id"]] = p.error(known[p.row["device"]])
    for name, error in errors.items():
        print(f"{name:24} {error:+.1%}")
    print("median", statistics.median(map(abs, errors.values())))
    apart = [abs(math.log1p(error)) for error in errors.values()]
    print("eight of ten within", math.expm1(np.quantile(apart, 0.8)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    rows = json.loads((HERE / "rows.json").read_text())
    if options.fit:
        if not options.programs:
            parser.error("--fit needs --programs")
        return fit(rows, options.programs)
    print(
        "| row | needed GB | fits | predicted s | published s | error |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        if options.only not in row["id"]:
            continue
        plan = planned(row, options.programs)
        seconds, needed = plan["predicted_seconds"], (plan["needed_bytes"] or 0) / 1e9
        error = f"{seconds / row['step_s'] - 1:+.0%}"
        fits = "yes" if plan["fits"] else "no"
        cells = f"{needed:.1f} | {fits} | {seconds:.4g} | {row['step_s']:.4g} | {error}"
        print(f"| {row['id']} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
