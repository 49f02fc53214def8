"""Commands that train on the digits, and what they leave in a folder."""

import json
import signal
import time

from research_dp.types import MEASURED

DIGITS = "--gin_file=gin/runs/digits.gin"
WITH_MLP = [DIGITS, "--gin_file=gin/models/mlp.gin"]
MLP = [*WITH_MLP, "--gin.mlp.widths=(32,)"]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def records(folder, split=None, *, measured=False):
    """What was recorded, without what is measured if not asked for."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if measured or k not in MEASURED}
        for line in lines
        if split in (None, line["split"])
    ]


def lines(folder, split):
    """The records of a split by step, with what is measured."""
    return {record["step"]: record for record in records(folder, split, measured=True)}


def killed_once_saved(command, folder, *flags):
    """Starts a run, or continues it, and kills it as soon as it has saved once more."""

    def saved():
        return {p.name for p in (folder / "checkpoints").glob("*") if p.name.isdigit()}

    before = saved()
    process = command(*flags, f"--workdir={folder}", start_only=True)
    deadline = time.monotonic() + 120
    while not saved() - before:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "summary.json").exists()
