"""Compiles a strategy's step for some devices; what it costs there, and which batch fits."""

from __future__ import annotations

import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from research_dp.analysis.comm_lower_bound import min_wire_bytes, narrow_file
from research_dp.analysis.program_cost import ProgramCost, on_average, read, wire_totals
from research_dp.analysis.topologies import Topology, topology
from research_dp.distributed.mesh import batch_devices
from research_dp.distributed.placement import ProgramMemory, nbytes
from research_dp.errors import UsageError, first_line
from research_dp.planning.row import CollectiveTotal, Row
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec
from research_dp.strategies.strategy import init_key

_MEASURED_STEPS = 5
_MAX_COMPILATIONS = 4
_MAX_GROWTH = 8  # of a batch from one compilation to the next: memory further away is a guess
_MAX_EXAMPLES = 2**31 - 1  # their positions in the batch are int32
_NEARLY_FULL = 0.97  # the part of the memory above which another compilation is not worth it
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OUT_OF_MEMORY = re.compile(  # as XLA's TPU compiler words it; its GPU compiler never says it
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(|Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"
)

Compile = Callable[[TrainSpec], Row]  # with another batch size or number of micro-batches


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What `compile_row` made."""

    row: Row
    strategy: Strategy
    program: Any  # its training step; None if it does not compile
    cost: ProgramCost | None = None  # None too if the program cannot be read


def compile_row(
    name: str, config: StrategyConfig, spec: TrainSpec, where: Topology, dump: Path | None = None
) -> Compiled:
    """Builds a strategy on these devices, compiles its step, dumps and reads the program."""
    start = time.perf_counter()
    strategy = config.build(spec)
    state, batch = strategy.abstract_state, strategy.abstract_batch
    row = Row(
        name,
        mesh=dict(strategy.mesh.shape),
        batch_size=spec.batch_size,
        accumulation_steps=spec.accumulation_steps,
        parameters=sum(x.size for x in jax.tree.leaves(strategy.logical_state.params)),
        params_bytes=nbytes(state.params)[0],
        opt_bytes=nbytes(state.opt_state)[0],
        slots_bytes=nbytes(state.slots)[0],
        state_bytes=nbytes(state)[0],
        padding_bytes=_padding(state, strategy.logical_state),
        batch_bytes=nbytes(batch)[0],
        available_bytes=where.memory_budget()[0],
    )
    step: Any = strategy.train_step  # jitted, so that it can be lowered
    lowered = step.lower(state, batch)
    cost = None
    with tempfile.TemporaryDirectory() as folder:
        program = compile_step(row, lowered, dump_options(where.chip.platform, Path(folder)))
        row.compile_seconds = time.perf_counter() - start
        if program is not None:
            try:
                text = text_of(program, Path(folder))
                if dump is not None:
                    (dump / f"{re.sub(r'[^+.=, 0-9A-Za-z_-]', '_', name)}.txt").write_text(text)
                cost = read(program, strategy.mesh, where, text)
                if config.outer is not None:
                    cost = _with_outer(row, cost, strategy, where)
                _set_costs(row, cost, spec, where)
            except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
                row.problem = row.problem or f"its program cannot be read: {first_line(error)}"
    try:
        row.min_wire_bytes, row.narrow_file = min_wire_bytes(strategy, spec), narrow_file(strategy)
        if row.narrow_file:
            row.narrow_wire_bytes = min_wire_bytes(strategy, spec, widest=2)
    except NotImplementedError as error:
        unknown = f"the least that it must send is not known: {first_line(error)}"
        row.problem = row.problem or unknown
    return Compiled(row, strategy, program, cost)


def _padding(stored: Any, logical: Any) -> int:
    """Bytes of padding on a device, on average over the devices that share an array."""
    leaves = zip(jax.tree.leaves(stored), jax.tree.leaves(logical), strict=True)
    sizes = ((nbytes(x)[0], cut.size / x.size) for x, cut in leaves if x.size)
    return round(sum(size * (1 - part) for size, part in sizes))


def resized(where: Topology, count: int) -> Topology:
    """So many devices of a topology's kind, on hosts (GPU) or slices (TPU) as large as its own.

    Fewer devices than that are one smaller host or slice. A single slice may be larger, too.

    Raises:
        UsageError: There is no such topology; the message says what is possible.
    """
    chip, (groups, members) = where.chip, where.domains
    if chip.platform == "cpu":
        return topology(f"cpu:{count}")
    if chip.platform == "tpu" and groups == 1:
        if count > chip.slice_chips:
            raise UsageError(
                f"a slice of {chip.name} has at most {chip.slice_chips:,} chips: plan for slices, "
                f"e.g. 2x{where.name}."
            )
        return topology(f"{chip.name}-{count}")
    if count > members and count % members:
        kind = "hosts" if chip.platform == "gpu" else "slices"
        raise UsageError(
            f"{where.name} has {kind} of {members} devices: give a multiple of {members}, or fewer."
        )
    groups, members = max(1, count // members), min(count, members)
    is_gpu = chip.platform == "gpu"
    return topology(
        f"{chip.name}:{groups}x{members}" if is_gpu else f"{groups}x{chip.name}-{members}"
    )


def compile_resized(
    name: str, where: Topology, other: Topology, config: StrategyConfig, spec: TrainSpec
) -> Row:
    """Compiles a strategy on other devices than `where`, with as many examples on each."""
    batch_size = spec.batch_size * len(other.devices) // len(where.devices)
    return compile_row(name, config, dataclasses.replace(spec, batch_size=batch_size), other).row


def dump_options(platform: str, folder: Path) -> dict[str, Any]:
    """Compiler options that write programs into an empty folder, for `text_of`.

    A TPU's compiler can be newer than jaxlib, which then cannot print all of its programs.
    """
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True} if platform == "tpu" else {}


def text_of(program: Any, folder: Path) -> str:
    """A compiled program's text: from the folder of `dump_options`, else as jaxlib prints it."""
    dumps = sorted(folder.glob("*.after_codegen.txt"), key=lambda file: file.stat().st_size)
    return dumps[-1].read_text() if dumps else program.as_text()


def compile_step(row: Row, lowered: Any, options: dict[str, Any]) -> Any:
    """Compiles a step, and sets what it needs; None, and the row says why, if that fails.

    A TPU's compiler refuses what does not fit, a GPU's never does.
    """
    program = None
    try:
        program = lowered.compile(options or None)
        row.temp_bytes, row.peak_bytes, row.needed_bytes = ProgramMemory.of(program)
        row.fits = row.available_bytes is None or row.needed_bytes <= row.available_bytes
    except jax.errors.JaxRuntimeError as error:
        row.fits = False
        sizes = _OUT_OF_MEMORY.search(str(error))
        if sizes is None:
            row.problem = f"does not compile: {first_line(error)}"
            return None
        number, unit = (group for group in sizes.groups() if group is not None)
        row.needed_bytes = int(float(number) * _UNITS[unit])
    if not row.fits:
        needed, available = row.needed_bytes / 1e9, (row.available_bytes or 0) / 1e9
        state = f", of which state {row.state_bytes / 1e9:.2f}" if row.state_bytes else ""
        row.problem = f"does not fit: needs {needed:.2f} of {available:.2f} GB a device{state}"
    return program


def _with_outer(row: Row, cost: ProgramCost, strategy: Strategy, where: Topology) -> ProgramCost:
    """The cost of a step on average, with what replicas do that meet.

    The row keeps what the largest of the programs needs.
    """
    (_, _, share), *others = strategy.programs
    parts = [(cost, share)]
    for outer, arguments, share in others:
        before = dataclasses.replace(row)
        program = compile_step(row, outer.lower(*arguments), {})
        if program is not None:
            parts.append((read(program, strategy.mesh, where), share))
        if (before.needed_bytes or 0) > (row.needed_bytes or 0):
            for name in ("temp_bytes", "peak_bytes", "needed_bytes", "fits", "problem"):
                setattr(row, name, getattr(before, name))
    return on_average(parts)


def _set_costs(row: Row, cost: ProgramCost, spec: TrainSpec, where: Topology) -> None:
    row.wire_bytes = wire_totals(cost.collectives)
    totals: dict[tuple[str, str, str, str, int], tuple[int, float]] = {}
    for c in cost.collectives:
        alike = (c.kind, "+".join(c.axes), c.dtype, c.purpose, c.devices)
        count, total = totals.get(alike, (0, 0.0))
        totals[alike] = (count + c.operations, total + c.wire_bytes)
    row.collectives = [CollectiveTotal(*alike, *total) for alike, total in sorted(totals.items())]
    schedule = cost.schedule
    names = ("compute", "memory", "network_inside", "network_across", "exposed", "slowed")
    row.predicted_parts = {name: getattr(schedule, name) for name in names}
    row.predicted_parts["latency"] = max(0.0, schedule.exposed - cost.without_latency.exposed)
    row.bound = max(names[:4], key=row.predicted_parts.__getitem__).replace("_", " ")
    row.predicted_seconds, row.is_lower_bound = schedule.step, schedule.is_lower_bound
    if (known := where.chip.calibration) and not schedule.is_lower_bound:
        step, spread, row.calibrated_by = schedule.step, 1 + known.spread, known.by
        row.predicted_range = (step / spread, step * spread)
    row.flops, row.hidden_fraction = cost.flops, schedule.hidden_fraction
    if schedule.step:
        examples = row.examples_per_second = spec.batch_size / schedule.step
        if spec.model.work is not None:
            work = spec.model.work(spec.example)
            row.tokens_per_second = work.tokens * examples
            if work.flops:
                row.mfu = work.flops * examples / (where.chip.peak(work.dtype) * row.devices)


def measure(compiled: Compiled) -> None:
    """Runs the step of a strategy that fits, and records how long it takes or why it cannot run."""
    row = compiled.row
    try:
        row.measured_seconds = _median_seconds(compiled)
    except jax.errors.JaxRuntimeError as error:
        # The compiler does not count other programs on the device, or buffers of the links.
        row.fits = row.fits and "RESOURCE_EXHAUSTED" not in first_line(error)
        row.problem = f"cannot be run here: {first_line(error)}"
        return
    for rate in ("mfu", "tokens_per_second", "examples_per_second"):
        if row.predicted_seconds and (value := getattr(row, rate)):
            setattr(row, rate, value * row.predicted_seconds / row.measured_seconds)


def _median_seconds(compiled: Compiled) -> float:
    """Of five steps, after one; the examples are zeros: that is as slow in dense computations."""
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


def largest_batch(config: StrategyConfig, spec: TrainSpec, row: Row, compile_with: Compile) -> Row:
    """The row of the largest batch that fits in as many micro-batches as the run, whose `row` fits.

    If none larger was found: that of two batches in twice as many micro-batches; `row` itself if
    that does not fit either, or memory has no limit.
    """
    limit = row.available_bytes
    if limit is None or 2 * spec.batch_size > _MAX_EXAMPLES:
        return row
    step = batch_devices(config.mesh) * spec.accumulation_steps
    known = {spec.batch_size // step: row}  # by examples a device and micro-batch
    size = 2 * (spec.batch_size // step)
    for _ in range(_MAX_COMPILATIONS):
        larger = compile_with(dataclasses.replace(spec, batch_size=size * step))
        if larger.needed_bytes is None:
            break
        known[size] = larger
        following = min(_next_size(known, limit), _MAX_EXAMPLES // step)
        nearly_full = larger.fits and larger.needed_bytes > _NEARLY_FULL * limit
        if following in known or nearly_full:
            break
        size = following
    best = known[max(size for size, tried in known.items() if tried.fits)]
    if best is not row:
        return best
    sizes = {name: 2 * getattr(spec, name) for name in ("batch_size", "accumulation_steps")}
    larger = compile_with(dataclasses.replace(spec, **sizes))
    return larger if larger.fits else row


def _next_size(known: dict[int, Row], limit: int) -> int:
    """Where the line through the two known sizes next to the limit meets it, rounded down."""
    sizes = sorted(known)
    above = next((i for i, size in enumerate(sizes) if not known[size].fits), len(sizes) - 1)
    low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
    needed_low, needed_high = (known[size].needed_bytes or 0 for size in (low, high))
    slope = max(1.0, (needed_high - needed_low) / (high - low))
    meets = int(low + (limit - needed_low) / slope)
    if known[high].fits:
        return max(high, min(meets, _MAX_GROWTH * high))
    return max(low, min(meets, high - 1))


def fewest_micro_batches(
    config: StrategyConfig, spec: TrainSpec, row: Row, compile_with: Compile
) -> Row | None:
    """The same batch in as few micro-batches as fit, where the state fits, but `row` does not.

    If even one example a device at a time does not fit, its row; None if `row` is that already.
    """
    most = spec.batch_size // batch_devices(config.mesh)
    counts = [n for n in range(spec.accumulation_steps + 1, most + 1) if most % n == 0]
    if not counts:
        return None
    best = compile_with(dataclasses.replace(spec, accumulation_steps=counts[-1]))
    low, high = 0, len(counts) - 1  # below `low` none fits; `high` fits
    for _ in range(_MAX_COMPILATIONS - 1):
        if not best.fits or low == high:
            break
        middle = (low + high) // 2
        fewer = compile_with(dataclasses.replace(spec, accumulation_steps=counts[middle]))
        if fewer.fits:
            best, high = fewer, middle
        else:
            low = middle + 1
    return best
