"""What the flight recorder, the watchdog and the non-finite check add to a step.

python experiments/overhead/survival.py [--model=convnet] [--steps=2400] [--part=NAME]

One run of the command's loop switches all or one of them off and on every few steps, so that both
sides of a pair are adjacent in time. The script also times each alone, called repeatedly, and
compares that with a step.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.commands import jax_setup
from research_dp.config import load
from research_dp.runs.flight_recorder import Recorder
from research_dp.training.nonfinite import NonfiniteCheck
from research_dp.training.trainer import Trainer
from research_dp.training.watchdog import Watchdog

BLOCK = 20
SKIPPED = 60
WATCHDOG_SECONDS = 60.0
PARTS = ("recorder", "nonfinite", "watchdog")


class Switch:
    """Switches them on and off, and records the time of each block of steps."""

    def __init__(self, parts):
        self._parts = parts
        self.on, self.times, self._began, self._watch = True, {True: [], False: []}, None, None
        self._note, self._check = Recorder.note, NonfiniteCheck.check
        self._dispatched = Trainer._dispatched

    def install(self):
        def dispatched(trainer, step, state, metrics):
            self._dispatched(trainer, step, state, metrics)
            if step >= SKIPPED and step % BLOCK == 0:
                now = time.perf_counter()
                if self._began is not None:
                    self.times[self.on].append(now - self._began)
                self._turn(trainer.recorder)
                self._began = time.perf_counter()

        Trainer._dispatched = dispatched

    def _turn(self, recorder):
        if self._watch:
            self._watch.close()
            self._watch = None
        self.on = not self.on
        if "recorder" in self._parts:
            Recorder.note = self._note if self.on else lambda *_: None
        if "nonfinite" in self._parts:
            NonfiniteCheck.check = self._check if self.on else lambda *_: None
        if "watchdog" in self._parts and self.on:
            self._watch = contextlib.ExitStack()
            self._watch.enter_context(Watchdog(recorder, WATCHDOG_SECONDS).watch())

    def restore(self):
        if self._watch:
            self._watch.close()
        Recorder.note, NonfiniteCheck.check = self._note, self._check
        Trainer._dispatched = self._dispatched


def alone(function, times=20000):
    """Returns the seconds of one call, averaged over many."""
    started = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - started) / times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--part", choices=PARTS, help="switch this one alone")
    flags = parser.parse_args()
    files = [f"gin/{f}.gin" for f in ("runs/digits", f"strategies/{flags.strategy}")]
    bindings = [f"train.num_steps = {flags.steps}", "train.eval_every = None"]
    bindings.append("train.checkpoint_every = None")
    load.load([*files, f"gin/models/{flags.model}.gin"], bindings)
    jax_setup.set_up_devices(8)
    jax_setup.set_up_compilation_cache()
    from research_dp.training.train import train

    switch = Switch([flags.part] if flags.part else PARTS)
    switch.install()
    with tempfile.TemporaryDirectory() as folder:
        train(workdir=folder)
    switch.restore()
    pairs = [a / b for a, b in zip(switch.times[True], switch.times[False], strict=False)]
    step = statistics.median(switch.times[False]) / BLOCK
    low, middle, high = statistics.quantiles(pairs, n=4)
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder)) as recorder:
        note = alone(lambda: recorder.note("step", 12345))
        watchdog = Watchdog(recorder, WATCHDOG_SECONDS)
        check = alone(watchdog.check, 200)
    # As a step leaves them: on all devices, and not read before.
    everywhere = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec())
    unread = iter([jax.device_put(np.zeros(20), everywhere) for _ in range(300)])
    nonfinite = NonfiniteCheck([""] * 19, "stop", "", print)
    flags = alone(lambda: nonfinite.check(1, next(unread)), 300)
    print(f"on / off: {middle:.4f} (median of {len(pairs)} pairs, quartiles {low:.4f} {high:.4f})")
    print(
        f"a step takes {step * 1e3:.2f} ms; two notes {2 * note * 1e6:.1f} us, the check "
        f"of its flags {flags * 1e6:.1f} us, the watchdog {check * 1e6:.0f} us each second: "
        f"{(2 * note + flags) / step + check:.3%} of it"
    )


if __name__ == "__main__":
    main()
