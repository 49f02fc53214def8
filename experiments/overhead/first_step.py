"""Time from command to first step, beside a hand-written script that does the same step.

python experiments/overhead/first_step.py

Both start a fresh Python process with an empty compilation cache and end after the first step of
the model, batch and optimizer of gin/runs/digits.gin under `ddp` on 8 CPU devices. The script
(`by_hand.py`) uses jax, flax and optax alone and random images; ours reads the data set, which is
prepared already.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PAIRS = 5
HERE = Path(__file__).resolve().parent


def run(words: list[str]) -> str:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, *words], env=environment, check=True, capture_output=True, text=True
        )
    return done.stdout


def by_hand() -> float:
    return float(run([str(HERE / "by_hand.py")]).split()[-1])


def ours() -> float:
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--gin_file=gin/runs/digits.gin",
            "--gin_file=gin/strategies/ddp.gin",
            "--gin.train.num_steps=1",
            "--cpu_devices=8",
            f"--workdir={folder}",
        ]
        run(["-m", "research_dp.train", *flags])
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return summary["seconds_to_first_step"]


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
