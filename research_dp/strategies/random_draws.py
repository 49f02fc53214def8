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
    global_rows = spec.batch_size // spec.accumulation_steps
    local = global_rows // batch_devices(strategy.mesh)
    unknown = (
        "whether random numbers depend on how the batch is split is not known: the loss of "
        f"{global_rows} examples, as one device has them, "
    )
    try:
        seen, expected = (_draws(spec, strategy, rows) for rows in (local, global_rows))
    except Exception as error:  # the model's own code may raise anything, and the run goes on
        return DrawReport(unknown + f"cannot be traced ({type(error).__name__})", is_known=False)
    if len(seen) != len(expected):
        times = f"draws {len(expected)} times, that of {local} examples {len(seen)} times"
        return DrawReport(unknown + times, is_known=False)
    wrong = dict.fromkeys(
        a.where
        for a, b in zip(seen, expected, strict=True)
        # One key for several examples; or keys that are counted by the place on a device, or one
        # example's key, used for all.
        if a.shape != b.shape or (a.keys != b.keys) != a.of_examples
    )
    if not wrong:
        return None
    return DrawReport(
        f"random numbers at {some_of(list(wrong), 3)} depend on how the batch is split "
        f"({local} of {global_rows} examples a device): a key serves several examples, or "
        "comes from its index on the device; draw for each example with its own key of `keys`",
        is_known=True,
    )


def _draws(spec: TrainSpec, strategy: Strategy, rows: int) -> Sequence[_Draw]:
    """What the loss of so many examples draws, in the order of its program."""
    state, model = strategy.abstract_state, spec.model
    more = {"units": Units()} if model.units else {}

    def loss(params: Any, model_state: Any, examples: Any, keys: Any) -> Any:
        axes = strategy.batch_axes
        return model.loss(params, model_state, examples, keys, train=True, batch_axes=axes, **more)

    example = spec.example.items()
    examples = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in example}
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    axes = list(strategy.mesh.shape.items())
    program = jax.make_jaxpr(loss, axis_env=axes)(state.params, state.model_state, examples, keys)
    # By where an operation is: a loop's body is visited more than once, the last time for good.
    draws: dict[tuple[int, ...], list[_Draw]] = {}

    def visit(equation: Any, given: Sequence[Source], callers: Callers) -> None:
        path = (*callers, equation)
        if equation.primitive.name in (*_DRAWS, "random_fold_in"):
            # One key and many numbers make each example's own key only if the key is its own.
            drawing, of_examples = [equation], given[0] is None
            turns = tuple(e.params["length"] for i, e in enumerate(callers) if _brings(path[i:]))
        else:
            inner = [e for jaxpr in jaxprs_in_params(equation.params) for e, _ in walk(jaxpr)]
            drawing, of_examples = [e for e in inner if e.primitive.name in _DRAWS], None in given
            turns = ()
        draws[tuple(map(id, path))] = [_draw(e, turns, of_examples, path[0]) for e in drawing]

    trace_sources(program, len(jax.tree.leaves((state.params, state.model_state))), visit)
    return list(itertools.chain(*draws.values()))


def _draw(equation: Any, turns: tuple[int, ...], of_examples: bool, caller: Any) -> _Draw:
    keys = equation.invars[0].aval.shape
    folds = equation.primitive.name == "random_fold_in"
    shape = () if folds else equation.outvars[0].aval.shape[len(keys) :]
    frames = caller.source_info.traceback.frames
    own = next((f for f in frames if not f.file_name.startswith(_LIBRARIES)), frames[0])
    where = f"{Path(own.file_name).name}:{own.line_num} ({own.function_name})"
    return _Draw((*turns, *keys), shape, of_examples, where)


def _brings(path: Callers) -> bool:
    """Whether an operation's first caller is a scan, each turn of which brings keys of its own."""
    scan, *inside = path
    if scan.primitive.name != "scan":
        return False
    scanned = []

    def visit(equation: Any, given: Sequence[Source], callers: Callers) -> None:
        if [*map(id, (*callers, equation))] == [*map(id, inside)]:
            scanned.append(given[0] is None)

    before = scan.params["num_consts"] + scan.params["num_carry"]
    trace_sources(scan.params["jaxpr"], before, visit)
    return any(scanned)
