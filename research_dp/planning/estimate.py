"""Compiles a strategy's step for some devices, and reads or measures what it costs there."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from research_dp.analysis.comm_lower_bound import min_wire_bytes
from research_dp.analysis.compile import DoesNotFitError, compile_to_fit, dump_options, text_of
from research_dp.analysis.program_cost import ProgramCost, read
from research_dp.analysis.topologies import Topology
from research_dp.distributed.hardware import Chip
from research_dp.distributed.placement import nbytes
from research_dp.errors import first_line
from research_dp.planning.memory_budget import memory_budget
from research_dp.planning.row import CollectiveTotal, Memory, Row, Setup, Timing, Traffic
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec
from research_dp.strategies.strategy import init_key

_MEASURED_STEPS = 5
_PARTS = ("compute", "memory", "network_inside", "network_across")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A row, the built strategy, and its compiled training step; None if it does not compile."""

    row: Row
    strategy: Strategy
    program: Any


def compile_row(
    name: str, config: StrategyConfig, spec: TrainSpec, where: Topology, dump: Path | None = None
) -> Compiled:
    """Builds a strategy on a mesh of these devices, compiles its step and reads it.

    The program's text is written to the folder `dump`. UsageError: it cannot be built so.
    """
    start = time.perf_counter()
    strategy = config.build(spec)
    state, batch = strategy.abstract_state, strategy.abstract_batch
    setup = Setup(
        slots=tuple(n for n in ("gather", "sync", "update") if getattr(strategy.config, n)),
        mesh=dict(strategy.mesh.shape),
        batch_size=spec.batch_size,
        accumulation_steps=spec.accumulation_steps,
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
    )
    memory = Memory(
        params_bytes=nbytes(state.params)[0],
        opt_bytes=nbytes(state.opt_state)[0],
        state_bytes=nbytes(state)[0],
        batch_bytes=nbytes(batch)[0],
        available_bytes=memory_budget(where)[0],
    )
    row = Row(name, setup, memory)
    step: Any = strategy.train_step  # jitted, so that it can be lowered
    lowered = step.lower(state, batch)
    with tempfile.TemporaryDirectory() as folder:
        options = dump_options(where.chip.platform, Path(folder))
        program = _compile(row, memory, lowered, options)
        row.compile_seconds = time.perf_counter() - start
        if program is not None:
            _set_needed(row, memory, program.memory_analysis())
            try:
                text = text_of(program, Path(folder))
                if dump is not None:
                    (dump / f"{re.sub(r'[^+.=, 0-9A-Za-z_-]', '_', name)}.txt").write_text(text)
                cost = read(program, strategy.mesh, where, text)
                row.traffic = _traffic(cost)
                row.timing = _timing(cost, spec, where.chip, strategy.mesh.size)
            except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
                _set_missing(row, "its program cannot be read", error)
    try:
        row.min_wire_bytes = min_wire_bytes(strategy, spec)
    except NotImplementedError as error:
        _set_missing(row, "the least that it must send is not known", error)
    return Compiled(row, strategy, program)


def compile_scaled(row: Row, where: Topology, config: StrategyConfig, spec: TrainSpec) -> Row:
    """Compiles a row's strategy on other devices, with as many examples on each."""
    assert row.setup is not None
    batch_size = row.setup.batch_size * len(where.devices) // row.setup.devices
    scaled = dataclasses.replace(spec, batch_size=batch_size)
    return compile_row(row.strategy, config, scaled, where).row


def _set_missing(row: Row, what: str, error: Exception) -> None:
    """Says why figures are missing, unless the row has a graver problem."""
    row.problem = row.problem or f"{what}: {first_line(error)}"


def _compile(row: Row, memory: Memory, lowered: Any, options: dict[str, Any]) -> Any:
    """The compiled program; None, and the row says why, if there is none."""
    try:
        return compile_to_fit(lowered, options)
    except DoesNotFitError as error:
        memory.needed_bytes = error.needed_bytes
        row.problem = _does_not_fit(memory)
    except jax.errors.JaxRuntimeError as error:
        row.problem = f"does not compile: {first_line(error)}"
    return None


def _set_needed(row: Row, memory: Memory, compiled: Any) -> None:
    memory.temp_bytes = compiled.temp_size_in_bytes
    memory.peak_bytes = compiled.peak_memory_in_bytes
    results = compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    at_once = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes + results
    needed = memory.needed_bytes = max(compiled.peak_memory_in_bytes, at_once)
    row.fits = memory.available_bytes is None or needed <= memory.available_bytes
    row.problem = None if row.fits else _does_not_fit(memory)


def _does_not_fit(memory: Memory) -> str:
    needed, available = memory.needed_bytes or 0, memory.available_bytes or 0
    state = f", of which state {memory.state_bytes / 1e9:.2f}" if memory.state_bytes else ""
    return f"does not fit: needs {needed / 1e9:.2f} of {available / 1e9:.2f} GB a device{state}"


def _traffic(cost: ProgramCost) -> Traffic:
    wire_bytes: dict[str, Any] = {"total": cost.wire_bytes}
    for key, field in (("by_kind", "kind"), ("by_axis", "axes"), ("by_dtype", "dtype")):
        sums = cost.wire_bytes_by(field)
        wire_bytes[key] = {name: total for (name,), total in sorted(sums.items())}
    totals: dict[tuple[str, str, str, str, int], tuple[int, float]] = {}
    for c in cost.collectives:
        alike = (c.kind, "+".join(c.axes), c.dtype, c.purpose, c.devices)
        count, total = totals.get(alike, (0, 0.0))
        totals[alike] = (count + c.operations, total + c.wire_bytes)
    collectives = [CollectiveTotal(*alike, *total) for alike, total in sorted(totals.items())]
    return Traffic(collectives, wire_bytes)


def _timing(cost: ProgramCost, spec: TrainSpec, chip: Chip, devices: int) -> Timing:
    schedule = cost.schedule
    parts = {name: getattr(schedule, name) for name in _PARTS}
    rates: dict[str, float] = {}
    if schedule.step:
        examples = rates["examples_per_second"] = spec.batch_size / schedule.step
        if spec.model.work is not None:
            work = spec.model.work(spec.example)
            rates["tokens_per_second"] = work.tokens * examples
            rates["mfu"] = work.flops * examples / (chip.peak(work.dtype) * devices)
    return Timing(
        flops=cost.flops,
        hidden_fraction=schedule.hidden_fraction,
        predicted_seconds=schedule.step,
        is_lower_bound=schedule.is_lower_bound,
        predicted_parts={**parts, "exposed": schedule.exposed},
        bound=max(parts, key=lambda part: parts[part]).replace("_", " "),
        **rates,
    )


def measure(compiled: Compiled) -> None:
    """Runs the step of a strategy that fits, and records how long it takes or why it cannot run.

    The median of five, after one that does not count. The state is a run's first; the examples are
    zeros, which do not change the time of dense computations.
    """
    row = compiled.row
    try:
        row.set_measured(_median_seconds(compiled))
    except jax.errors.JaxRuntimeError as error:
        # The compiler does not count other programs on the device, or buffers of the links.
        row.fits = row.fits and "RESOURCE_EXHAUSTED" not in first_line(error)
        row.problem = f"cannot be run here: {first_line(error)}"


def _median_seconds(compiled: Compiled) -> float:
    strategy, examples = compiled.strategy, {}
    # An example has no dims of device, micro-batch and row.
    leading = strategy.abstract_batch.position.ndim
    for name, x in strategy.abstract_batch.examples.items():
        examples[name] = np.zeros((len(strategy.train_rows), *x.shape[leading:]), x.dtype)
    batch, state, seconds = strategy.place_batch(examples), strategy.init(init_key(0)), []
    for _ in range(_MEASURED_STEPS + 1):
        start = time.perf_counter()
        state, metrics = compiled.program(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
