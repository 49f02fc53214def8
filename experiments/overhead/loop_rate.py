"""Compares steps a second of the command with a bare loop over the same compiled step.

python experiments/overhead/loop_rate.py [--strategy=fsdp] [--model=convnet] [--in_flight=1]

The bare loop calls `Strategy.train_step` on batches that are already on the devices, and reads
nothing back. Two others are the least that a run can do: one places batches from the host, and one
reads them too. All run in one process, one after the other. The first 20 steps are not counted.
"""

import argparse
import collections
import itertools
import statistics
import tempfile
import time

import jax

from research_dp.commands import jax_setup
from research_dp.config import gin_internals, load
from research_dp.strategies import TrainSpec
from research_dp.training.trainer import Trainer
from research_dp.types import TrainOrder

PAIRS = 5
SKIPPED = 20


def bare(strategy, state, batches, steps, in_flight):
    """Returns the steps a second of a loop that does nothing else.

    It waits for earlier steps: with hundreds in flight XLA's CPU client deadlocks.
    """
    started, running = 0.0, collections.deque()
    for step, batch in enumerate(itertools.islice(batches, steps)):
        if step == SKIPPED:
            started = time.perf_counter()
        state, metrics = strategy.train_step(state, batch)
        running.append(metrics)
        if len(running) == in_flight:
            jax.block_until_ready(running.popleft())
    jax.block_until_ready(running)
    return (steps - SKIPPED) / (time.perf_counter() - started)


def in_bursts(place, batches):
    """Yields batches that are placed 16 at a time, which warm caches make the fastest."""
    while placed := [place(batch) for batch in itertools.islice(batches, 16)]:
        yield from placed


def command_rate(steps):
    """Returns the steps a second of the command's loop, with reading and recording."""
    times = []
    original = Trainer._dispatched

    def timed(self, step, state, metrics):
        original(self, step, state, metrics)
        if step == SKIPPED:
            jax.block_until_ready(metrics)
            times.append(time.perf_counter())
        if step == steps:
            jax.block_until_ready(metrics)
            times.append(time.perf_counter())

    Trainer._dispatched = timed
    from research_dp.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        train(workdir=folder)
    Trainer._dispatched = original
    return (steps - SKIPPED) / (times[1] - times[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--in_flight", type=int, default=1, help="steps in flight in the bare loop")
    flags = parser.parse_args()
    files = [f"gin/{f}.gin" for f in ("runs/digits", f"strategies/{flags.strategy}")]
    bindings = [f"train.num_steps = {flags.steps}", "train.eval_every = None"]
    bindings.append("train.checkpoint_every = None")  # the bare loop saves nothing either
    load.load([*files, f"gin/models/{flags.model}.gin"], bindings)
    jax_setup.set_up_devices(8)
    jax_setup.set_up_compilation_cache()

    def bound(name):
        return gin_internals.value_of(f"train.{name}")

    data = bound("data")
    spec = TrainSpec(
        model=bound("model"),
        optimizer=bound("optimizer"),
        example=data.example,
        batch_size=bound("batch_size"),
    )
    strategy = bound("strategy").build(spec)

    def order(num_steps):
        rows = strategy.train_rows
        return TrainOrder(seed=0, batch_size=128, rows=rows, first_step=0, num_steps=num_steps)

    host = list(data.train(order(8)))
    place, placed = strategy.place_batch, [strategy.place_batch(batch) for batch in host]
    loops = {
        "bare loop": lambda: itertools.cycle(placed),
        "places": lambda: in_bursts(place, itertools.cycle(host)),
        "reads and places": lambda: in_bursts(place, iter(data.train(order(flags.steps)))),
    }
    rates = collections.defaultdict(list)
    for _ in range(PAIRS):
        for name, loop in loops.items():
            state = strategy.init(jax.random.key(0))
            rates[name].append(bare(strategy, state, loop(), flags.steps, flags.in_flight))
        rates["command"].append(command_rate(flags.steps))
    for name, ours in rates.items():
        ratios = sorted(a / b for a, b in zip(ours, rates["bare loop"], strict=True))
        print(
            f"{flags.strategy}, {flags.model}, {name}: {statistics.median(ours):.1f} steps/s, "
            f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
