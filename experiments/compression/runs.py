"""Trains `lm_stdlib` under strategies that compress, and under some that are expected to fail.

python experiments/compression/runs.py DIR   # a folder a run; those that are done stay
python experiments/compression/runs.py DIR --table   # their held-out losses
"""

import json
import subprocess
import sys
from pathlib import Path

RUN = [
    "--gin_file=runs/lm_stdlib.gin",
    *("--gin.NUM_STEPS=600", "--gin.train.batch_size=8", "--gin.train.log_every=50"),
    *("--cpu_devices=8", "--allow_unused", "--gin.compression.min_size=1024"),
]
POWER_SGD = ["--gin.data_parallel.sync=@power_sgd()", "--gin.power_sgd.min_size=1024"]
ENCODED = "--gin.data_parallel.compression=@compression()"
FEEDBACK = "--gin.compression.error_feedback=True"
# A strategy's gin file, and what else is bound.
CASES = {
    "ddp": ["ddp"],
    "fsdp_q8": ["compressed/fsdp_q8"],
    "ddp_q8": ["compressed/ddp_q8"],
    "zero1_q4": ["compressed/zero1_q4"],
    "power_sgd_1": ["ddp", *POWER_SGD, "--gin.power_sgd.rank=1"],
    "power_sgd_2": ["ddp", *POWER_SGD, "--gin.power_sgd.rank=2"],
    "power_sgd_4": ["ddp", *POWER_SGD, "--gin.power_sgd.rank=4"],
    "power_sgd_8": ["ddp", *POWER_SGD, "--gin.power_sgd.rank=8"],
    "int4_weights": ["fsdp", ENCODED, "--gin.compression.gather=@int4()"],
    "top_k": ["ddp", ENCODED, "--gin.compression.sync=@top_k()"],
    "top_k_fed_back": ["ddp", ENCODED, "--gin.compression.sync=@top_k()", FEEDBACK],
    "int4": ["ddp", ENCODED, "--gin.compression.sync=@int4()"],
    "int4_fed_back": ["ddp", ENCODED, "--gin.compression.sync=@int4()", FEEDBACK],
    "zero1_q4_no_hadamard": ["compressed/zero1_q4", "--gin.hadamard/int4.hadamard=False"],
}
SEEDS = {name: (0, 1, 2) for name in ("ddp", "fsdp_q8", "ddp_q8", "zero1_q4")}


def runs() -> list[tuple[str, int]]:
    """Returns each case and seed, the first seed of all cases first."""
    return [(case, s) for s in range(3) for case in CASES if s in SEEDS.get(case, (0,))]


def main() -> None:
    """Runs what is missing, or prints the table."""
    root = Path(sys.argv[1])
    losses: dict[str, list[float]] = {}
    for case, seed in runs():
        folder = root / f"{case}_{seed}"
        done = folder / "summary.json"
        if not done.exists() and "--table" not in sys.argv:
            strategy, *bound = CASES[case]
            words = [*RUN, f"--gin_file=strategies/{strategy}.gin", *bound]
            words += [f"--gin.train.seed={seed}", f"--workdir={folder}"]
            subprocess.run([sys.executable, "-m", "research_dp.train", *words], check=True)
        if done.exists():
            losses.setdefault(case, []).append(json.loads(done.read_text())["eval"]["loss"])
    for case, found in losses.items():
        base = losses["ddp"][: len(found)]
        above = 100 * (sum(found) / sum(base) - 1)
        print(f"{case:24}{' '.join(f'{loss:.4f}' for loss in found):24}{above:+.2f} %")


if __name__ == "__main__":
    main()
