"""Compares the time from command to first step with a hand-written script of the same step.

python experiments/overhead/first_step.py

Both run the model, batch and optimizer of gin/runs/digits.gin under `ddp` on 8 CPU devices. Each
starts a new Python process with an empty compilation cache. The time is measured from outside,
until the process reports its first step. The script (`by_hand.py`) uses only jax, flax and optax,
and random images. Ours reads the data set, which is already prepared.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAIRS = 5
HERE = Path(__file__).resolve().parent


def seconds_until(line_begins: str, words: list[str]) -> float:
    """Returns the wall time from the start of a process to a line of its output."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
        started, seconds = time.perf_counter(), None
        with subprocess.Popen(
            [sys.executable, "-u", *words], env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                if line.startswith(line_begins) and seconds is None:
                    seconds = time.perf_counter() - started
    assert process.returncode == 0 and seconds is not None
    return seconds


def by_hand() -> float:
    return seconds_until("First step", [str(HERE / "by_hand.py")])


def ours() -> float:
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--gin_file=gin/runs/digits.gin",
            "--gin_file=gin/strategies/ddp.gin",
            "--gin.train.num_steps=1",
            "--cpu_devices=8",
            f"--workdir={folder}",
        ]
        return seconds_until("First step", ["-m", "research_dp.train", *flags])


def main() -> None:
    ours()  # prepares the data set
    by_hand()
    pairs = [(ours(), by_hand()) for _ in range(PAIRS)]
    for name, values in zip(("ours", "by hand"), zip(*pairs, strict=True), strict=True):
        print(f"{name}: {statistics.median(values):.2f} s to the first step")
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"ratio {ratio:.2f} (median of {PAIRS} pairs)")


if __name__ == "__main__":
    main()
