"""Measures how much of a run's time saving takes: a model of 100 MB, saved every 50 steps.

python experiments/saving/blocking.py [--strategy=fsdp] [--devices=8] [--pairs=3] [--batch_size=128]

One run alternates between saving and not saving (A B A B), so that other work on the machine
affects both equally. For each pair the script prints two figures: the share of the time between
saves during which the loop waits, and how much longer 50 steps take with a save. The second also
counts what the background thread takes from the steps.
"""

import argparse
import itertools
import statistics
import tempfile
import time

import jax

from research_dp.commands import jax_setup
from research_dp.config import load
from research_dp.training.trainer import Trainer

EVERY = 50
WIDTH = 4992  # 25 million parameters, 100 MB; with Adam's moments a checkpoint has 300 MB


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=128)
    flags = parser.parse_args()
    files = ("runs/digits", "models/mlp", f"strategies/{flags.strategy}")
    steps = EVERY * (2 * flags.pairs + 1)
    bindings = [
        f"mlp.widths = ({WIDTH}, {WIDTH})",
        f"train.num_steps = {steps}",
        f"train.batch_size = {flags.batch_size}",
        f"train.checkpoint_every = {EVERY}",
        "train.eval_every = None",
        "train.keep = 1",
    ]
    load.load([f"gin/{file}.gin" for file in files], bindings)
    jax_setup.set_up_devices(flags.devices)
    jax_setup.set_up_compilation_cache()
    from research_dp.training.train import train

    marks = []  # (when the save began, when the loop went on, whether it was real)
    original = Trainer._save

    def save(self, state, step):
        jax.block_until_ready(state)  # without the time of the saves
        began, real = time.perf_counter(), len(marks) % 2 == 1
        if real:
            original(self, state, step)
        marks.append((began, time.perf_counter(), real))

    Trainer._save = save
    with tempfile.TemporaryDirectory() as folder:
        train(workdir=folder)
    # Intervals between the starts of two saves; the first one follows a skipped save.
    intervals = [(b[0] - a[0], a[1] - a[0]) for a, b in itertools.pairwise(marks)]
    blocked, longer = [], []
    for (without, _), (with_one, waited) in zip(intervals[0::2], intervals[1::2], strict=False):
        blocked.append(waited / with_one)
        longer.append(with_one / without - 1)
        print(
            f"{EVERY} steps: {without:.1f} s without a save, {with_one:.1f} s with one, "
            f"{waited:.2f} s of it waiting: {blocked[-1]:.1%} blocked, {longer[-1]:+.1%} in all"
        )
    print(
        f"{flags.strategy} on {flags.devices} devices: {statistics.median(blocked):.1%} blocked, "
        f"{statistics.median(longer):+.1%} in all (medians of {len(blocked)} pairs)"
    )


if __name__ == "__main__":
    main()
