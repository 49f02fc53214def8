"""Draws the two pictures of README.md, those of losses, and one of slow links.

python tools/pictures.py strategies   # docs/strategies*.svg, from a plan of lm_1b on 8 H100s
python tools/pictures.py loss runs/single runs/fsdp runs/zero1   # docs/loss.svg, from metrics.jsonl
python tools/pictures.py held_out runs/AdamW runs/Muon   # docs/held_out_loss.svg, likewise
python tools/pictures.py ranks runs/ddp runs/rank_1   # docs/power_sgd_ranks.svg, likewise
python tools/pictures.py replicas runs/ddp runs/diloco   # docs/replicas_loss.svg, likewise
python tools/pictures.py links   # docs/link_speed.svg, predicted steps of lm_1b on 8 hosts

The runs are the quickstart with --gin_file=strategies/NAME.gin --gin.train.log_every=10.

Both are readable on a light and on a dark page: the background is transparent.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

matplotlib.use("svg")

ROOT = Path(__file__).resolve().parents[1]
TEXT = "#7a7f87"  # readable on white and on black
COLORS = {"parameters": "#3f88c5", "gradients": "#e0803c", "optimizer state": "#45a06f"}
ORDER = [
    *("single", "ddp", "spmd", "zero1"),
    *("zero2", "fsdp", "fsdp_keep", "hsdp", "hsdp_zero1", "spmd_fsdp"),
]
DEVICES = 8
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "research_dp",
    "font.family": "sans-serif",
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def plan() -> dict[str, Any]:
    """Returns the plan of all strategies on one host with eight H100s."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        flags = ["--gin_file=experiments/plan/lm_1b.gin", f"--topology=h100:1x{DEVICES}"]
        words = [sys.executable, "-m", "research_dp.plan", *flags, "--strategies=all"]
        subprocess.run([*words, f"--json={file}"], cwd=ROOT, check=True)
        return json.loads(file.read_text())["strategies"]


def temporarily_full() -> dict[str, set[str]]:
    """Returns what each strategy's step makes full for a time, although it is stored as shards."""
    from research_dp.config import gin_internals, load

    jax.config.update("jax_num_cpu_devices", DEVICES)
    result: dict[str, set[str]] = {}
    for name in ORDER:
        load.reset()
        load.load([f"gin/strategies/{name}.gin"])
        config = gin_internals.value_of("train.strategy")
        if config.gather and not config.reshard_after_forward:
            result[name] = {"parameters", "gradients"}
        elif config.shard and config.sync and not config.gather and config.sync_each == "step":
            result[name] = {"gradients"}
    load.reset()
    return result


def draw_strategies() -> list[Path]:
    """Draws what each of eight devices stores under each strategy, also for narrow screens."""
    plans, temporary = plan(), temporarily_full()
    return [
        draw_grid(plans, temporary, 5, "strategies.svg"),
        draw_grid(plans, temporary, 2, "strategies_narrow.svg"),
    ]


def draw_grid(
    plans: dict[str, Any], temporary: dict[str, set[str]], columns: int, name_of_file: str
) -> Path:
    """Draws a panel for each strategy, so many in a row."""
    full, rows = plans["single"], len(ORDER) // columns
    foot = 0.5 * (2 if columns < 4 else 1)  # for the legend, inches
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(2 * columns, 2.6 * rows + foot), squeeze=False
    )
    for name, axes in zip(ORDER, panels.flat, strict=True):
        one = plans[name]
        shards = {
            "parameters": round(full["params_bytes"] / one["params_bytes"]),
            "optimizer state": round(full["opt_bytes"] / one["opt_bytes"]),
        }
        shards["gradients"] = shards["optimizer state"]
        for row, kind in enumerate(COLORS):
            count = 1 if name == "single" else DEVICES
            draw_row(axes, row, kind, shards[kind], count, kind in temporary.get(name, ()))
        lines = f"memory {one['needed_bytes'] / 1e9:.1f} GB\nsends {gigabytes_sent(one)}"
        axes.set_title(name, fontsize=13, fontweight="bold", color=TEXT)
        axes.text(DEVICES / 2, -0.35, lines, ha="center", va="top", fontsize=10.5)
        axes.set(xlim=(-0.1, DEVICES + 0.1), ylim=(-1.75, 9.8))
        axes.axis("off")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    handles.append(Rectangle((0, 0), 1, 1, facecolor=TEXT, alpha=0.3))
    labels = [*COLORS, "full only during a step"]
    wide = min(4, columns)
    figure.legend(handles, labels, loc="lower center", ncols=wide, frameon=False, fontsize=11)
    height = figure.get_figheight()
    edges = {"top": 1 - 0.34 / height, "bottom": foot / height}
    figure.subplots_adjust(left=0.01, right=0.99, hspace=0.3, wspace=0.12, **edges)
    return save(figure, name_of_file)


def gigabytes_sent(one: dict[str, Any]) -> str:
    """Returns what a device sends in a step."""
    sent = one["wire_bytes"]["total"]
    return f"{sent / 1e9:.1f} GB" if sent else "nothing"


def draw_row(axes: Axes, row: int, kind: str, shards: int, devices: int, temporary: bool) -> None:
    """Draws one array on all devices: the outline is the full array, the filled part the shard."""
    bottom, height = 6.6 - 3.3 * row, 2.9
    for device in range(devices):
        left = device + (DEVICES - devices) / 2
        axes.add_patch(
            Rectangle((left + 0.08, bottom), 0.84, height, fill=False, ec=TEXT, lw=0.5, alpha=0.7)
        )
        if temporary:
            box = (left + 0.08, bottom)
            axes.add_patch(Rectangle(box, 0.84, height, color=COLORS[kind], lw=0, alpha=0.3))
        position = bottom + height * (1 - (device % shards + 1) / shards)
        box = (left + 0.08, position)
        axes.add_patch(Rectangle(box, 0.84, height / shards, color=COLORS[kind], lw=0))


def draw_loss(runs: list[Path]) -> Path:
    """Draws the training loss of runs, from their records."""
    figure, axes = pyplot.subplots(figsize=(7, 2.9))
    looks = [("#3f88c5", "-", 4.0), ("#e0803c", "-", 1.6), ("#45a06f", (0, (3, 2)), 1.6)]
    for run, (color, dashes, width) in zip(runs, looks, strict=False):
        summary = json.loads((run / "summary.json").read_text())
        label = f"{summary['strategy']}, {summary['devices']} devices".replace(
            "1 devices", "1 device"
        )
        alpha = 0.45 if width > 2 else 1.0
        axes.plot(*losses(run, "train"), color=color, ls=dashes, lw=width, alpha=alpha, label=label)
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    return save_curves(figure, axes, "loss.svg")


def draw_held_out(runs: list[Path]) -> Path:
    """Draws the held-out loss of runs, from their records, each with its folder's name."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for run, color in zip(runs, ["#3f88c5", "#e0803c", "#c9a227", "#a8553a"], strict=False):
        axes.plot(*losses(run, "eval"), color=color, lw=1.6, marker=".", label=run.name)
    axes.set(xlabel="step", ylabel="held-out loss, nats a byte")
    return save_curves(figure, axes, "held_out_loss.svg")


def draw_inexact(runs: list[Path], *, name: str) -> Path:
    """Draws the training loss of runs, the first of them exact, each with its folder's name."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for number, run in enumerate(runs):
        color: Any = pyplot.get_cmap("viridis")(0.15 + 0.75 * number / len(runs))
        color, dashes = (color, "-") if number else (TEXT, ":")
        axes.plot(*losses(run, "train"), label=run.name, color=color, ls=dashes)
    axes.set(xlabel="step", ylabel="training loss, nats a byte")
    return save_curves(figure, axes, name)


def draw_links() -> Path:
    """Draws predicted times of a step over the speed of links between hosts, by strategy."""
    from research_dp.analysis.topologies import topology
    from research_dp.commands import plan_candidates
    from research_dp.commands.configured import Run
    from research_dp.planning.estimate import compile_row

    where, rates = topology("h100:8x8"), [2e9, 5e9, 1e10, 2e10, 5e10, 1e11, 2e11, 4e11]
    looks = {
        "ddp": ("#7a7f87", ":"),
        "hsdp": ("#7a7f87", "--"),
        "ddp_q8": ("#3f88c5", "-"),
        "zero1_q4": ("#e0803c", "-"),
        "hsdp_powersgd": ("#45a06f", "-"),
        "ddp_sign": ("#c9a227", "-"),
    }
    run = Run(["experiments/plan/lm_1b.gin"], allow_unused=True)
    figure, axes = pyplot.subplots(figsize=(7, 3.4))
    for name, (color, dashes) in looks.items():
        sizes = {"data": 64, "fsdp": 1} if name == "ddp_sign" else {"data": 8, "fsdp": 8}
        files = plan_candidates.of([name])[0].files
        load_it = functools.partial(run.load, files, [f"make_mesh.axes = {sizes}"])
        compile_it = functools.partial(compile_row, name, where=where)
        made: Any = plan_candidates.built_under(run, load_it, name, where.devices, compile_it)
        times = [1e3 * made.cost.seconds_at(rate / 8) for rate in rates]
        axes.plot([rate / 1e9 for rate in rates], times, color=color, ls=dashes, label=name)
    axes.set(xscale="log", yscale="log", xlabel="Gbit/s of a device between hosts")
    axes.set(ylabel="predicted step, ms")
    return save_curves(figure, axes, "link_speed.svg")


def losses(run: Path, split: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a run recorded its loss on a split, and the losses."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [record for record in records if record["split"] == split]
    return [record["step"] for record in found], [record["loss"] for record in found]


def save_curves(figure: Any, axes: Axes, name: str) -> Path:
    """Writes a picture of curves, which have labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    return save(figure, name)


def save(figure: Any, name: str) -> Path:
    """Writes a picture that has the same bytes each time."""
    path = ROOT / "docs" / name
    figure.savefig(path, transparent=True, metadata={"Date": None})
    return path


RUNS: dict[str, Any] = {
    "loss": draw_loss,
    "held_out": draw_held_out,
    "ranks": functools.partial(draw_inexact, name="power_sgd_ranks.svg"),
    "replicas": functools.partial(draw_inexact, name="replicas_loss.svg"),
}


def main() -> None:
    """Draws what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=[*RUNS, "strategies", "links"])
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs, for losses")
    flags = parser.parse_args()
    with pyplot.rc_context(STYLE):
        others = {"strategies": draw_strategies, "links": draw_links}
        draw = RUNS.get(flags.picture)
        made = draw(flags.runs) if draw else others[flags.picture]()
        print(*(made if isinstance(made, list) else [made]))


if __name__ == "__main__":
    main()
