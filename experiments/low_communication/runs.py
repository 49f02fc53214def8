"""Trains `lm_stdlib` by replicas that meet every few steps, on as many tokens as `ddp`.

python experiments/low_communication/runs.py DIR   # a folder a run; those that are done stay
python experiments/low_communication/runs.py DIR --table   # their held-out losses
"""

import json
import subprocess
import sys
from pathlib import Path

RUN = [
    "--gin_file=runs/lm_stdlib.gin",
    *("--gin.NUM_STEPS=600", "--gin.train.batch_size=8", "--gin.train.log_every=50"),
    "--cpu_devices=8",
]
FOLDER = "--gin_file=strategies/low_communication/"
# As Charles et al. have them (2025, arXiv 2503.09799), with momentum 0.9; every 30 steps.
PUBLISHED = {2: 0.4, 4: 0.6, 8: 0.8}


def replicas(count: int, name: str, every: int, *more: str) -> list[str]:
    """Returns the words of a strategy on so many replicas."""
    axes = f"--gin.make_mesh.axes={{'data': {count}, 'fsdp': {8 // count}}}"
    return [f"{FOLDER}{name}.gin", axes, f"--gin.outer.every={every}", *more]


def diloco(count: int, every: int, rate: float = 0.8, momentum: float = 0.5) -> list[str]:
    """Returns the words of DiLoCo."""
    outer = f"--gin.nesterov_outer.rate={rate}", f"--gin.nesterov_outer.momentum={momentum}"
    return replicas(count, "diloco", every, *outer)


CASES = {
    "ddp": ["--gin_file=strategies/ddp.gin"],
    **{f"diloco_{m}": diloco(m, 10) for m in PUBLISHED},
    **{f"local_sgd_{m}": replicas(m, "local_sgd", 10) for m in PUBLISHED},
    **{f"diloco_2_every_{h}": diloco(2, h) for h in (1, 30, 100)},
    "local_sgd_2_every_30": replicas(2, "local_sgd", 30),
    **{f"published_{m}": diloco(m, 30, rate, 0.9) for m, rate in PUBLISHED.items()},
    "sparseloco_2": replicas(2, "sparseloco", 10),
}
SEEDS = {name: (0, 1, 2) for name in ("ddp", *(f"diloco_{m}" for m in PUBLISHED))}


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
            words = [*RUN, *CASES[case], f"--gin.train.seed={seed}", f"--workdir={folder}"]
            subprocess.run([sys.executable, "-m", "research_dp.train", *words], check=True)
        if done.exists():
            losses.setdefault(case, []).append(json.loads(done.read_text())["eval"]["loss"])
    for case, found in losses.items():
        base = losses["ddp"][: len(found)]
        above = 100 * (sum(found) / sum(base) - 1)
        print(f"{case:24}{' '.join(f'{loss:.4f}' for loss in found):24}{above:+.2f} %")


if __name__ == "__main__":
    main()
