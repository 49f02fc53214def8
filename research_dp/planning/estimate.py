"""One row of a plan: a strategy, compiled for some devices, and what its step costs there."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from research_dp.analysis.comm_lower_bound import min_wire_bytes
from research_dp.analysis.compile import DoesNotFitError, compile_to_fit, dumping, text_of
from research_dp.analysis.program_cost import ProgramCost, read
from research_dp.analysis.topologies import Topology
from research_dp.distributed.placement import nbytes
from research_dp.errors import UsageError, message_of
from research_dp.planning.memory_budget import available_bytes
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec


@dataclasses.dataclass
class Row:
    """What a strategy's step costs, a device. None: not known, `problem` says why.

    Attributes:
        strategy: Its name.
        slots: Which of a strategy's slots are filled: what travels otherwise, the compiler or the
            update sends.
        mesh: Sizes of the mesh's axes.
        batch_size: Examples a step, over all devices.
        accumulation_steps: Micro-batches a step.
        parameters: Number of parameters of the model.
        params_bytes: Of the parameters that a device holds.
        opt_bytes: Of its optimizer state.
        state_bytes: Of all that it holds between steps.
        batch_bytes: Of its part of a batch.
        temp_bytes: Of what the step needs besides.
        peak_bytes: Most in use at any moment, by the compiler.
        needed_bytes: State, batch, temporary memory, and results that take no argument's place.
        available_bytes: What a step may count on; None: there is no limit.
        fits: Whether `needed_bytes` is at most that.
        collectives: Each with kind, axes, dtype, purpose, devices (of a group), count, wire_bytes.
        wire_bytes: Bytes sent a step: 'total', 'by_kind', 'by_axis', 'by_dtype'.
        min_wire_bytes: By the README's table.
        hidden_fraction: The share of the wire bytes that travel behind compute; None: there are
            none.
        flops: Of matrix multiplications; those of custom kernels are left out.
        predicted_seconds: A step, from vendors' rates.
        is_lower_bound: Whether the prediction counts one turn of a loop that takes an unknown
            number of them.
        predicted_parts: Its parts, each as if it were alone: 'compute', 'memory',
            'network_inside' a host (GPU) or slice (TPU), 'network_across'; and 'exposed', the wait
            for the network.
        bound: The longest of the first four.
        mfu: Model FLOPs over what the devices could do at most; this and the rates that follow are
            measured where the step was.
        tokens_per_second: Of all devices.
        examples_per_second: Of all devices.
        compile_seconds: Tracing and compiling.
        measured_seconds: A step on these devices, where they are there and it was asked for.
        problem: Why it cannot be run so, in a sentence.
    """

    strategy: str
    slots: tuple[str, ...] = ()
    mesh: dict[str, int] | None = None
    batch_size: int | None = None
    accumulation_steps: int | None = None
    parameters: int | None = None
    params_bytes: int | None = None
    opt_bytes: int | None = None
    state_bytes: int | None = None
    batch_bytes: int | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    fits: bool = False
    collectives: list[dict[str, Any]] | None = None
    wire_bytes: dict[str, Any] | None = None
    min_wire_bytes: float | None = None
    hidden_fraction: float | None = None
    flops: int | None = None
    predicted_seconds: float | None = None
    is_lower_bound: bool = False
    predicted_parts: dict[str, float] | None = None
    bound: str | None = None
    mfu: float | None = None
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    compile_seconds: float | None = None
    measured_seconds: float | None = None
    problem: str | None = None

    @property
    def wire_total(self) -> float:
        """Wire bytes in all; 0 where they are not known."""
        return self.wire_bytes["total"] if self.wire_bytes else 0.0

    @property
    def wire_ratio(self) -> float | None:
        """Wire bytes over the least; None where nothing must be sent, or it is not known."""
        if not self.min_wire_bytes or self.wire_bytes is None:
            return None
        return self.wire_total / self.min_wire_bytes

    def take(self, seconds: float) -> None:
        """Fills in a step's measured time, and the rates that go with it."""
        self.measured_seconds = seconds
        if self.predicted_seconds:
            for rate in ("mfu", "tokens_per_second", "examples_per_second"):
                value = getattr(self, rate)
                setattr(self, rate, value and value * self.predicted_seconds / seconds)

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "wire_ratio": self.wire_ratio}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A row, and the program behind it.

    Attributes:
        row: The row.
        strategy: The built strategy.
        program: Its compiled training step; None if it does not compile.
    """

    row: Row
    strategy: Strategy
    program: Any


def compile_row(
    name: str, recipe: StrategyConfig, spec: TrainSpec, where: Topology, dump: Path | None = None
) -> Compiled:
    """Builds a strategy, compiles its step and reads it.

    Args:
        name: What the row is called.
        recipe: The strategy, its mesh made of `where`'s devices.
        spec: The run.
        where: The devices.
        dump: A folder for the compiled program's text.

    Raises:
        UsageError: The strategy cannot be built so.
    """
    start = time.perf_counter()
    built = recipe.build(spec)
    row = _held(name, built, spec, where)
    step: Any = built.train_step  # jitted, so that it can be lowered
    shapes = (built.abstract_state, built.abstract_batch)
    with tempfile.TemporaryDirectory() as written:
        options = dumping(where.chip.platform, Path(written))
        program = _compile(row, step.lower(*shapes), options)
        row.compile_seconds = time.perf_counter() - start
        if program is not None:
            _kept(row, program.memory_analysis())  # known, whatever becomes of the rest
            try:
                text = text_of(program, Path(written))
                if dump is not None:
                    (dump / f"{re.sub(r'[^+.=, 0-9A-Za-z_-]', '_', name)}.txt").write_text(text)
                cost = read(program, built.mesh, where, text)
                _sent(row, cost)
                _timed(row, cost, spec, where, built)
            except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
                _lacks(row, "its program cannot be read", error)
    try:
        row.min_wire_bytes = min_wire_bytes(built, spec)
    except NotImplementedError as error:
        _lacks(row, "the least that it must send is not known", error)
    return Compiled(row, built, program)


def _lacks(row: Row, what: str, error: Exception) -> None:
    """Says why figures are missing, unless there is a problem that weighs more."""
    row.problem = row.problem or f"{what}: {str(error).splitlines()[0]}"


def _compile(row: Row, lowered: Any, options: dict[str, Any]) -> Any:
    """The compiled program; None, and the row says why, if there is none."""
    try:
        return compile_to_fit(lowered, options)
    except DoesNotFitError as error:
        row.needed_bytes = error.needed_bytes
        row.problem = _too_large(row)
    except jax.errors.JaxRuntimeError as error:
        row.problem = f"does not compile: {str(error).splitlines()[0]}"
    return None


def refused(name: str, error: UsageError) -> Row:
    """The row of a strategy that cannot be built."""
    return Row(name, problem=f"refused: {message_of(error)}")


def _held(name: str, built: Strategy, spec: TrainSpec, where: Topology) -> Row:
    """A row with what is known before anything is compiled."""
    state = built.abstract_state
    return Row(
        strategy=name,
        slots=tuple(n for n in ("gather", "sync", "update") if getattr(built.config, n)),
        mesh=dict(built.mesh.shape),
        batch_size=spec.batch_size,
        accumulation_steps=spec.accumulation_steps,
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
        params_bytes=nbytes(state.params)[0],
        opt_bytes=nbytes(state.opt_state)[0],
        state_bytes=nbytes(state)[0],
        batch_bytes=nbytes(built.abstract_batch)[0],
        available_bytes=available_bytes(where),
    )


def _kept(row: Row, memory: Any) -> None:
    """Fills in what the compiler says of memory."""
    row.temp_bytes, row.peak_bytes = memory.temp_size_in_bytes, memory.peak_memory_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    given = memory.argument_size_in_bytes
    row.needed_bytes = max(row.peak_bytes, given + row.temp_bytes + results)
    row.fits = row.available_bytes is None or row.needed_bytes <= row.available_bytes
    row.problem = None if row.fits else _too_large(row)


def _sent(row: Row, cost: ProgramCost) -> None:
    """Fills in FLOPs and traffic."""
    row.flops = cost.flops
    row.wire_bytes = {"total": cost.wire_bytes}
    for key, field in (("by_kind", "kind"), ("by_axis", "axes"), ("by_dtype", "dtype")):
        sums = cost.wire_bytes_by(field)
        row.wire_bytes[key] = {name: sent for (name,), sent in sorted(sums.items())}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in cost.collectives:
        which = (one.kind, "+".join(one.axes), one.dtype, one.purpose, one.devices)
        what = dict(zip(("kind", "axes", "dtype", "purpose", "devices"), which, strict=True))
        entry = found.setdefault(which, {**what, "count": 0, "wire_bytes": 0.0})
        entry["count"] += one.operations
        entry["wire_bytes"] += one.wire_bytes
    row.collectives = [found[which] for which in sorted(found)]


def _timed(row: Row, cost: ProgramCost, spec: TrainSpec, where: Topology, built: Strategy) -> None:
    """Fills in predicted times, and rates that follow from them."""
    played = cost.schedule
    alone = {
        "compute": played.compute,
        "memory": played.memory,
        "network_inside": played.network_inside,
        "network_across": played.network_across,
    }
    row.hidden_fraction = played.hidden_fraction
    row.predicted_seconds = played.step
    row.is_lower_bound = played.is_lower_bound
    row.predicted_parts = {**alone, "exposed": played.exposed}
    row.bound = max(alone, key=lambda part: alone[part]).replace("_", " ")
    if not played.step:
        return
    row.examples_per_second = spec.batch_size / played.step
    if spec.model.work is not None:
        work = spec.model.work(spec.example)
        row.tokens_per_second = work.tokens * row.examples_per_second
        most = where.chip.peak_of(work.dtype) * built.mesh.size
        row.mfu = work.flops * row.examples_per_second / most


def _too_large(row: Row) -> str:
    needed, available = row.needed_bytes or 0, row.available_bytes or 0
    state = f", of which state {row.state_bytes / 1e9:.2f}" if row.state_bytes else ""
    return f"does not fit: needs {needed / 1e9:.2f} of {available / 1e9:.2f} GB a device{state}"


def fastest_first(rows: Iterable[Row]) -> list[Row]:
    """Those that fit, the shortest step first: as measured if each of them was, or predicted."""
    fitting = [row for row in rows if row.fits and row.predicted_seconds is not None]
    if all(row.measured_seconds for row in fitting):
        return sorted(fitting, key=lambda row: row.measured_seconds or 0.0)
    return sorted(fitting, key=lambda row: row.predicted_seconds or 0.0)
