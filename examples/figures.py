"""Draws loss and memory of strategies for a paper, from the JSON files of `compare` and `plan`.

    python examples/figures.py compared.json plan.json

writes loss.svg and memory.svg here. It needs the extra `plots`.
"""

import json
import sys
from pathlib import Path

import altair as alt

PARTS = {"parameters": "params_bytes", "optimizer state": "opt_bytes", "temporary": "temp_bytes"}
SIZE = {"width": 320, "height": 180, "padding": {"left": 5, "right": 25, "top": 5, "bottom": 5}}
ABOVE = alt.Legend(orient="top", title=None)


def loss(compared):
    """A line of training loss for each run of a comparison."""
    points = [
        {"strategy": name, "step": step, "loss": loss}
        for name, run in compared["runs"].items()
        for step, loss in zip(*(run["records"]["train"][x] for x in ("step", "loss")), strict=True)
    ]
    lines = alt.Chart(alt.Data(values=points), **SIZE).mark_line()
    y = alt.Y("loss:Q", title="training loss", scale=alt.Scale(zero=False))
    # Strategies that agree cover each other: dashes show that there are several.
    color, dash = (of("strategy:N", legend=ABOVE) for of in (alt.Color, alt.StrokeDash))
    return lines.encode(alt.X("step:Q"), y, color, dash)


def memory(plan):
    """A bar of each strategy's memory on a device, by parts, in MB."""
    sizes = [
        {"strategy": name, "part": part, "MB": row[key] / 1e6}
        for name, row in plan["strategies"].items()
        if row["problem"] is None
        for part, key in PARTS.items()
    ]
    bars = alt.Chart(alt.Data(values=sizes), **SIZE).mark_bar()
    x = alt.X("MB:Q", title="MB per device", axis=alt.Axis(tickCount=5))
    y = alt.Y("strategy:N", title=None, sort=None)
    return bars.encode(x, y, alt.Color("part:N", legend=ABOVE))


if __name__ == "__main__":
    compared, plan = (json.loads(Path(file).read_text()) for file in sys.argv[1:])
    loss(compared).save("loss.svg")
    memory(plan).save("memory.svg")
