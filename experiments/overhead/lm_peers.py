"""Compares this package with its peers on equal work, in one, two and four processes on CPUs.

python experiments/overhead/lm_peers.py --torch=PYTHON [--rounds=N] [--only=CASE] [--counts=1,2,4]

PYTHON is the interpreter of an environment with PyTorch. All cases train `lm_tiny` from the same
weights, on the same 8 sequences a process, with AdamW and clipping. They must give the same losses.
Processes communicate over gloo on loopback. Process i is pinned to core i modulo the cores.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
SEQUENCES, LENGTH, WARM_UP = 8, 256, 5
OURS = (sys.executable, HERE / "lm_worker.py")
CASES = {
    "ours ddp": ("ours", "ddp"),
    "ours fsdp": ("ours", "fsdp"),
    "plain jit": ("by_hand", "jit"),
    "jit, our model": ("our_model", "jit"),
    "by hand fsdp": ("by_hand", "fsdp"),
    "xlstm-jax's fsdp": ("xlstm", "fsdp"),
    "PyTorch DDP": ("torch", "ddp"),
    "PyTorch FSDP2": ("torch", "fsdp"),
}


def write_weights(path: str) -> None:
    """Writes initial weights of `lm_tiny`; those of the four blocks are stacked."""
    draw, width, hidden = np.random.default_rng(0), 128, 384
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"gate_up": (width, 2 * hidden), "down": (hidden, width)}
    weights = {name: draw.normal(0, s[0] ** -0.5, (4, *s)) for name, s in shapes.items()}
    weights |= {name: np.ones((4, width)) for name in ("attention_norm", "mlp_norm")}
    weights |= {"embed": draw.normal(0, width**-0.5, (256, width)), "norm": np.ones(width)}
    np.savez(path, **{name: x.astype(np.float32) for name, x in weights.items()})


def inputs() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the initial weights and the tokens of this process."""
    draw = np.random.default_rng(int(os.environ["RANK"]))
    tokens = draw.integers(0, 256, (SEQUENCES, LENGTH)).astype(np.int32)
    return dict(np.load(os.environ["WEIGHTS"])), tokens


def measure(step, steps: int, mean=lambda losses: losses) -> None:
    """Runs `step`, which returns a loss; the first process prints what was measured.

    `mean` averages the losses over the processes, after the last step.
    """
    losses, seconds = [], []
    for i in range(steps):
        start = time.perf_counter()
        losses.append(float(step()))
        seconds.append(time.perf_counter() - start)
        if i == 0:
            first, cpu = time.time() - float(os.environ["STARTED"]), time.process_time()
    losses = mean(losses)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if os.environ["RANK"] == "0":
        times = {"ms": statistics.median(seconds[WARM_UP:]) * 1e3, "first": first, "cpu": cpu}
        print("measured", json.dumps({**times, "MB": peak, "losses": losses}), flush=True)


def run(command: list[str], count: int, weights: str) -> dict:
    """Runs a case in `count` processes and returns what the first one measured."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    cores, processes = sorted(os.sched_getaffinity(0)), []
    place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for i in range(count):
        place |= {"RANK": str(i), "STARTED": str(time.time()), "WEIGHTS": weights}
        processes.append(
            subprocess.Popen(
                ["taskset", "-c", str(cores[i % len(cores)]), *command],
                env={**os.environ, **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=HERE.parents[1],
            )
        )
    outputs = [process.communicate() for process in processes]
    lines = [x for x in outputs[0][0].splitlines() if x.startswith("measured ")]
    if any(process.returncode for process in processes):
        errors = "\n".join(error for _, error in outputs).strip()
        print(f"{' '.join(map(str, command))}, {count} processes: {errors}", file=sys.stderr)
    if not lines:
        sys.exit(1)
    return json.loads(lines[0].removeprefix("measured "))


def check_losses(case: str, count: int, losses: list[float], expected: list[float]) -> None:
    """Exits where a case trains otherwise than the first one in as many processes."""
    for i, (loss, other) in enumerate(zip(losses, expected, strict=True)):
        if not np.isclose(loss, other, rtol=1e-3):
            sys.exit(f"{case}, {count} processes, step {i}: loss {loss}, expected {other}")


def print_tables(cases: list[str], counts: list[int], results: dict) -> None:
    """Prints medians over rounds, with the least and greatest in parentheses."""

    def values(case: str, count: int, key: str) -> list[float]:
        return [result[key] for result in results[case, count]]

    def medians(case: str, key: str, digits: int = 0) -> list[str]:
        return [f"{statistics.median(values(case, n, key)):.{digits}f}" for n in counts]

    def spread(x: list[float], digits: int) -> str:
        return f"{statistics.median(x):.{digits}f} ({min(x):.{digits}f}-{max(x):.{digits}f})"

    def row(*cells: str) -> None:
        print("|", " | ".join(cells), "|")

    def head(*cells: str) -> None:
        row("case", *cells)
        print("|---" * (len(cells) + 1) + "|")

    head(*(f"{n}: ms" for n in counts), *(f"{n}: tokens/s" for n in counts))
    for case in cases:
        times = [values(case, n, "ms") for n in counts]
        pairs = zip(counts, times, strict=True)
        rates = [f"{n * SEQUENCES * LENGTH / statistics.median(ms) * 1e3:.0f}" for n, ms in pairs]
        row(case, *(spread(ms, 0) for ms in times), *rates)
    print()
    scaled, least = counts[1:], counts[0]
    columns = [f"{n}: {what}" for what in ("MB", "first s") for n in counts]
    head(*(f"ms {n} / {least}" for n in scaled), *columns, f"{least}: first CPU s")
    for case in cases:
        ms = {n: np.array(values(case, n, "ms")) for n in counts}
        cells = [spread(list(ms[n] / ms[least]), 2) for n in scaled]
        row(
            case,
            *cells,
            *medians(case, "MB"),
            *medians(case, "first", 1),
            medians(case, "cpu", 1)[0],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="", help="python with PyTorch; none: without its cases")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--counts", default="1,2,4", help="numbers of processes")
    flags = parser.parse_args()
    commands = {
        case: [
            *((flags.torch, HERE / "lm_torch.py") if code == "torch" else OURS),
            *(code, strategy, f"--steps={flags.steps}"),
        ]
        for case, (code, strategy) in CASES.items()
        if flags.only in case and (flags.torch or code != "torch")
    }
    counts = [int(count) for count in flags.counts.split(",")]
    results: dict[tuple[str, int], list[dict]] = {}
    expected: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_weights(f"{folder}/weights.npz")
        for _ in range(flags.rounds):
            for count in counts:
                for case, command in commands.items():
                    result = run(command, count, f"{folder}/weights.npz")
                    losses = result["losses"]
                    check_losses(case, count, losses, expected.setdefault(count, losses))
                    results.setdefault((case, count), []).append(result)
                    print(f"{case}, {count}: {result['ms']:.0f} ms", file=sys.stderr, flush=True)
    print_tables(list(commands), counts, results)


if __name__ == "__main__":
    main()
