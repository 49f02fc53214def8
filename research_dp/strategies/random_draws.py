"""Random numbers of a loss that depend on how the batch is split over devices.

Numbers are those of one device if each example has its own key, made of those that the loss is
given. A mask that is drawn for several examples from one key (`nn.Dropout`, `nnx.Dropout`) has
other values for an example on another number of devices, and no state shows it. So the program of
the loss is read: once as a device runs it, once as one device alone would.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
from jax.extend.core import jaxprs_in_params

from research_dp.distributed.jaxpr import Callers, Source, trace_sources, walk
from research_dp.distributed.mesh import batch_devices
from research_dp.distributed.units import Units
from research_dp.errors import some_of
from research_dp.strategies.strategy import Strategy, TrainSpec

_DRAWS = ("random_bits", "random_split", "random_gamma")
_LIBRARIES = tuple(f"{Path(str(library.__file__)).parent}/" for library in (flax, jax))
_NAMED = 3


class DrawReport(NamedTuple):
    """A sentence, and whether numbers are known to differ; False: the loss cannot be judged."""

    message: str
    is_known: bool


class _Draw(NamedTuple):
    """A drawing of random numbers, or of a key made of a key and a number."""

    keys: tuple[int, ...]  # their shape, over all turns of the loops that bring them
    shape: tuple[int, ...]  # of what is drawn with each key
    of_examples: bool  # whether the keys are made of the examples' or of the examples
    where: str  # the line of a source


def split_draws(spec: TrainSpec, strategy: Strategy) -> DrawReport | None:
    """Reports random numbers that differ from those of one device; None: there are none.

    Traces the loss twice if it draws at all; nothing is compiled. A loss that has a Python loop
    over examples cannot be judged.
    """
    if not strategy.splits_batch:
        return None
    # Building the strategy has cached this trace.
    program = jax.make_jaxpr(strategy.train_step)(strategy.abstract_state, strategy.abstract_batch)
    if not any(e.primitive.name in _DRAWS for e, _ in walk(program.jaxpr)):
        return None
    alone = spec.batch_size // spec.accumulation_steps
    local = alone // batch_devices(strategy.mesh)
    unknown = (
        "whether random numbers depend on how the batch is split is not known: the loss of "
        f"{alone} examples, as one device has them, "
    )
    try:
        seen, expected = (_draws(spec, strategy, rows) for rows in (local, alone))
    except Exception as error:  # the model's own code may raise anything, and the run goes on
        return DrawReport(unknown + f"cannot be traced ({type(error).__name__})", is_known=False)
    if len(seen) != len(expected):
        times = f"draws {len(expected)} times, that of {local} examples {len(seen)} times"
        return DrawReport(unknown + times, is_known=False)
    pairs = zip(seen, expected, strict=True)
    wrong = dict.fromkeys(a.where for a, b in pairs if _depends_on_split(a, b))
    if not wrong:
        return None
    return DrawReport(
        f"random numbers at {some_of(list(wrong), _NAMED)} depend on how the batch is split "
        f"({local} of {alone} examples a device): a key serves several examples, or comes from the "
        "place on a device; draw with `keys`, one key an example, as research_dp.models.dropout "
        "does",
        is_known=True,
    )


def _depends_on_split(local: _Draw, alone: _Draw) -> bool:
    """Whether an example's numbers depend on which others its device has."""
    by_example = local.keys != alone.keys
    # One key for several examples; or keys that are counted by the place on a device, or one
    # example's key, used for all.
    return local.shape != alone.shape or by_example != local.of_examples


def _draws(spec: TrainSpec, strategy: Strategy, rows: int) -> Sequence[_Draw]:
    """What the loss of so many examples draws, in the order of its program."""
    state, model = strategy.abstract_state, spec.model
    more = {"units": Units()} if model.units else {}

    def loss(params: Any, model_state: Any, examples: Any, keys: Any) -> Any:
        axes = strategy.batch_axes
        return model.loss(params, model_state, examples, keys, train=True, batch_axes=axes, **more)

    examples = {
        name: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for name, x in spec.example.items()
    }
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    axes = list(strategy.mesh.shape.items())
    program = jax.make_jaxpr(loss, axis_env=axes)(state.params, state.model_state, examples, keys)
    # By where an operation is: a loop's body is visited more than once, the last time for good.
    draws: dict[tuple[int, ...], list[_Draw]] = {}

    def visit(equation: Any, given: Sequence[Source], callers: Callers) -> None:
        first, place = (*callers, equation)[0], tuple(map(id, (*callers, equation)))
        if equation.primitive.name in (*_DRAWS, "random_fold_in"):
            # One key and many numbers make each example's own key only if the key is its own.
            turns = _turns(callers, equation)
            draws[place] = [_draw(equation, turns, given[0] is None, _where(first))]
            return
        inner = [e for jaxpr in jaxprs_in_params(equation.params) for e, _ in walk(jaxpr)]
        if drawing := [e for e in inner if e.primitive.name in _DRAWS]:
            draws[place] = [_draw(e, (), None in given, _where(first)) for e in drawing]

    count = len(jax.tree.leaves((state.params, state.model_state)))
    trace_sources(program, count, visit)
    return list(itertools.chain(*draws.values()))


def _draw(equation: Any, turns: tuple[int, ...], of_examples: bool, where: str) -> _Draw:
    keys = equation.invars[0].aval.shape
    folds = equation.primitive.name == "random_fold_in"
    shape = () if folds else equation.outvars[0].aval.shape[len(keys) :]
    return _Draw((*turns, *keys), shape, of_examples, where)


def _turns(callers: Callers, equation: Any) -> tuple[int, ...]:
    """The lengths of the scans around an operation, each turn of which brings keys of its own."""
    return tuple(
        scan.params["length"]
        for i, scan in enumerate(callers)
        if scan.primitive.name == "scan" and _is_scanned(scan, (*callers[i + 1 :], equation))
    )


def _is_scanned(scan: Any, place: Callers) -> bool:
    """Whether the keys of an operation in a scan come from the arrays that it scans."""
    scanned = []

    def visit(equation: Any, given: Sequence[Source], callers: Callers) -> None:
        if tuple(map(id, (*callers, equation))) == tuple(map(id, place)):
            scanned.append(given[0] is None)

    before = scan.params["num_consts"] + scan.params["num_carry"]
    trace_sources(scan.params["jaxpr"], before, visit)
    return any(scanned)


def _where(equation: Any) -> str:
    """The line of the model's source that an operation comes from."""
    frames = equation.source_info.traceback.frames
    own = next((f for f in frames if not f.file_name.startswith(_LIBRARIES)), frames[0])
    return f"{Path(own.file_name).name}:{own.line_num} ({own.function_name})"
