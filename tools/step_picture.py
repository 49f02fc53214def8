"""Draws one step under `fsdp` over time, from the compiled program: docs/fsdp_step.svg.

    python tools/step_picture.py

The step is that of lm_1b with four blocks on 8 H100s, compiled without a GPU (extra plan-gpu). It
is played through by the simulation behind `plan`, which notes when each stream does what.
"""

import dataclasses
import functools
import os
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from matplotlib import pyplot
from matplotlib.patches import Patch
from pictures import STYLE, TEXT, save

from research_dp.analysis import program_cost, schedule
from research_dp.analysis.hlo import Instruction
from research_dp.analysis.topologies import topology
from research_dp.commands import plan_candidates
from research_dp.commands.configured import Run
from research_dp.planning.estimate import compile_row

FILES = ["experiments/plan/lm_1b.gin"]
BINDINGS = ["transformer.depth = 4", "train.batch_size = 8"]
COLORS = {
    **{"all-gather": "#3f88c5", "reduce-scatter": "#e0803c", "other": "#a8a8a8"},
    **{
        "forward": "#45a06f",
        "forward again": "#9bc9b0",
        "backward": "#c9a227",
        "update": "#a8553a",
    },
}


class Piece(NamedTuple):
    """What a stream does from one time to another, in milliseconds."""

    stream: str  # 'compute' or 'network'
    kind: str
    start: float
    end: float
    path: str


class Noted(dict[Instruction, schedule.Events]):
    """Events of instructions, which notes what the simulation reads."""

    def __init__(self, played: "Played"):
        super().__init__()
        self.played = played

    def __getitem__(self, instruction: Instruction) -> schedule.Events:
        self.played.finish()
        self.played.current = instruction
        return super().__getitem__(instruction)


class Played(schedule._Simulation):
    """The simulation of a program that keeps what it did and when, also in each turn of a loop."""

    def __init__(self, chip: Any, network: schedule.Network):
        super().__init__(chip, network, Noted(self))
        self.pieces: list[Piece] = []
        self.current: Instruction | None = None

    def finish(self) -> None:
        """Notes the compute of the instruction that was read last: it has just ended."""
        if self.current is None:
            return
        elapsed = dict.__getitem__(self.events, self.current).elapsed
        if elapsed:
            self.note("compute", "", self.clock[schedule._COMPUTE_STREAM], elapsed, self.current)

    def note(self, stream: str, kind: str, end: float, seconds: float, of: Instruction) -> None:
        path = of.attribute(r'op_name="([^"]*)"')
        self.pieces.append(Piece(stream, kind, 1e3 * (end - seconds), 1e3 * end, path))

    def repeat(self, body: Any, trips: int) -> None:
        for _ in range(trips):
            self.run(body)
            self.finish()
            self.current = None

    def send(self, name: str) -> tuple[float, float, float]:
        sent = super().send(name)
        self.note("network", name, sent[0], sent[1], self.current)
        return sent


def pieces() -> list[Piece]:
    """What the streams do in the step, on a device of eight H100s."""
    where, run = topology("h100:1x8"), Run(FILES, allow_unused=True)
    load_it = functools.partial(run.load, plan_candidates.of(["fsdp"])[0].files, BINDINGS)
    compile_it = functools.partial(compile_row, "fsdp", where=where)
    made: Any = plan_candidates.built_under(run, load_it, "fsdp", where.devices, compile_it)
    kept: list[Piece] = []

    def play(entry: Any, chip: Any, network: Any, events: Any) -> schedule.Schedule:
        played = Played(chip, network)
        played.run(entry)
        played.finish()
        kept.extend(played.pieces)
        seconds = 1e-3 * max(piece.end for piece in kept)
        return dataclasses.replace(made.cost.schedule, step=seconds)

    simulate, program_cost.simulate = program_cost.simulate, play
    again = made.cost.seconds_at(program_cost.link_rate(where))
    program_cost.simulate = simulate
    if abs(again / made.cost.schedule.step - 1) > 0.01:
        raise ValueError(
            f"a step of {again} s was played, and one of {made.cost.schedule} predicted"
        )
    return kept


def look(piece: Piece) -> str:
    """The kind of a piece: what it has a colour for; '' if its path does not say it."""
    if piece.stream == "network":
        return next((kind for kind in COLORS if piece.kind.startswith(kind)), "other")
    if "shard_map" not in piece.path:
        return "update" if "add" in piece.path else ""
    if "transpose(" not in piece.path:
        return "forward"
    is_again = "rematted" in piece.path or "closed_call/jvp(" in piece.path
    return "forward again" if is_again else "backward"


def spans(found: list[Piece]) -> list[tuple[str, str, float, float]]:
    """Stream, kind, start and end; pieces of one kind that follow one another are one."""
    made: list[tuple[str, str, float, float]] = []
    for stream in ("network", "compute"):
        kind, start, end = "forward", 0.0, 0.0
        for piece in sorted((p for p in found if p.stream == stream), key=lambda p: p.start):
            of = look(piece) or kind
            if of != kind or piece.start > end + 0.01:
                made.append((stream, kind, start, end))
                start = piece.start
            kind, end = of, piece.end
        made.append((stream, kind, start, end))
    return made


def main() -> None:
    """Draws the two streams, with the time of each part of the step."""
    found = pieces()
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(10, 2.9))
        for stream, kind, start, end in spans(found):
            low = ("network", "compute").index(stream) - 0.36
            axes.broken_barh([(start, end - start)], (low, 0.72), color=COLORS[kind], lw=0)
        head = min(p.start for p in found if p.path.endswith("while/body/closed_call/dot_general"))
        back = min(p.start for p in found if "transpose(" in p.path and "Linen" in p.path)
        update = min(p.start for p in found if look(p) == "update")
        end = max(p.end for p in found)
        edges = [0.0, head, back, update, end]
        for left, right, name in zip(
            edges,
            edges[1:],
            ["4 blocks", "head and loss", "4 blocks, the last first", "update"],
            strict=False,
        ):
            axes.text((left + right) / 2, 1.45, name, ha="center", fontsize=9)
            axes.axvline(right, color=TEXT, lw=0.5, ls=":")
        axes.set(yticks=[0, 1], yticklabels=["network", "compute"], xlabel="ms", ylim=(-0.5, 1.7))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.margins(x=0.005)
        axes.tick_params(left=False)
        handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
        look_of_it = {"ncols": 7, "frameon": False, "handlelength": 1.0, "fontsize": 9}
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), **look_of_it)
        figure.tight_layout()
        print(save(figure, "fsdp_step.svg"))


if __name__ == "__main__":
    main()
