"""Measures how much of a run's time the comparison of replicas takes, at its own intervals.

python experiments/faults/replica_check.py [--run=digits] [--strategy=fsdp] [--devices=8]

Replicas are compared after the first step, which compiles the comparison, and before each save.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from research_dp.commands import jax_setup
from research_dp.config import load
from research_dp.training.replica_check import ReplicaCheck


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="digits", help="a file of gin/runs/")
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--devices", type=int, default=8)
    flags = parser.parse_args()
    load.load([f"gin/runs/{flags.run}.gin", f"gin/strategies/{flags.strategy}.gin"], [])
    jax_setup.set_up_devices(flags.devices)
    jax_setup.set_up_compilation_cache()
    from research_dp.training.train import train

    seconds = []
    original = ReplicaCheck.check

    def check(self, step, state):
        began = time.perf_counter()
        original(self, step, state)
        seconds.append(time.perf_counter() - began)

    ReplicaCheck.check = check
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        train(workdir=folder)
        step = 1 / json.loads((Path(folder) / "summary.json").read_text())["steps_per_second"]
    total = time.perf_counter() - began
    first, *others = seconds
    print(
        f"{flags.run}, {flags.strategy} on {flags.devices} devices: the first comparison took "
        f"{first:.3f} s, {len(others)} others {statistics.median(others):.4f} s each, "
        f"{statistics.median(others) / step:.2f} steps; "
        f"all {sum(seconds) / total:.2%} of {total:.1f} s"
    )


if __name__ == "__main__":
    main()
