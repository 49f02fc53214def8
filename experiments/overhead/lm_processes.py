"""Compares the step time of two processes with that of one, here and in PyTorch.

python experiments/overhead/lm_processes.py --torch=PYTHON [--rounds=N] [--only=CASE]

PYTHON is the interpreter of an environment with PyTorch. Each process has its own core and the same
batch, alone or as one of two. Two processes communicate over gloo on loopback. Cases alternate.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WARM_UP = 5


def worker(strategy: str, process: int, count: int, port: str, sequences: int, steps: int) -> None:
    """Runs one process of this package; the first one prints the seconds of its steps."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, process)
    import numpy as np
    from lm_steps import LENGTH, shipped

    built = shipped(strategy, sequences * count)
    tokens = np.random.default_rng(process).integers(0, 256, (sequences, LENGTH)).astype(np.int32)
    state, batch = built.init(jax.random.key(0)), built.place_batch({"tokens": tokens})
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = built.train_step(state, batch)
        jax.device_get(metrics["loss"])
        seconds.append(time.perf_counter() - start)
    if process == 0:
        print("seconds", *seconds)


def median_step(command: list[str], count: int, by_flags: bool, steps: int) -> float:
    """Runs a case in `count` processes, each on its own core."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = []
    for process in range(count):
        place = {"RANK": str(process), "WORLD_SIZE": str(count)}
        process_flags = [str(process), str(count), port] if by_flags else []
        processes.append(
            subprocess.Popen(
                ["taskset", "-c", str(process), *command, *process_flags],
                env={**os.environ, **place, "MASTER_ADDR": "localhost", "MASTER_PORT": port},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=HERE.parents[1],
            )
        )
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("\n".join(error for _, error in outputs))
    line = next(x for x in outputs[0][0].splitlines() if x.startswith("seconds"))
    seconds = [float(word) for word in line.split()[1:]]
    assert len(seconds) == steps
    return statistics.median(seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="python with PyTorch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=8, help="sequences of one process")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        strategy, process, count, port = flags.worker
        worker(strategy, int(process), int(count), port, flags.sequences, flags.steps)
        return
    sizes = [f"--sequences={flags.sequences}", f"--steps={flags.steps}"]
    me = [sys.executable, __file__, "--torch=", *sizes, "--worker"]
    torch = [flags.torch, str(HERE / "lm_torch.py"), *sizes]
    cases = {
        f"{whose} {strategy}": ([*command, strategy], whose == "ours")
        for whose, command, strategies in (
            ("ours", me, ("ddp", "fsdp")),
            ("PyTorch's", torch, ("ddp", "fsdp")),
        )
        for strategy in strategies
        if flags.only in f"{whose} {strategy}"
    }
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(flags.rounds):
        for case, (command, by_flags) in cases.items():
            for count in (1, 2):
                took = median_step(command, count, by_flags, flags.steps)
                times.setdefault((case, count), []).append(took)
    print(
        "| case | one process ms | two processes ms | ratio, median | all |\n|---|---|---|---|---|"
    )
    for case in cases:
        ones, twos = times[case, 1], times[case, 2]
        ratios = sorted(two / one for one, two in zip(ones, twos, strict=True))
        one, two = (f"{statistics.median(x) * 1e3:.0f}" for x in (ones, twos))
        spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {case} | {one} | {two} | {statistics.median(ratios):.3f} | {spread} |")


if __name__ == "__main__":
    main()
