"""The least bytes that a strategy must send: the README's table, parameter by parameter.

Nothing is read from the step that is judged: how wide an element is comes from the bindings of the
strategy's slots, how often a parameter is used from the model.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.embedding import take_rows
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS, batch_devices
from research_dp.distributed.sharding import TABLE, LeafSharding
from research_dp.distributed.units import Units
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec, slots
from research_dp.strategies.rng import example_keys

PyTree = Any

_INDEX = 4  # bytes: rows are looked up by int32


def min_wire_bytes(strategy: Strategy, spec: TrainSpec) -> float:
    """Bytes that a device sends in a step over rings, by the README's table.

    A table that is split by feature sends the rows that are looked up, where they are fewer than
    its own. Sums of metrics, and norms, come on top.

    Args:
        strategy: The built strategy: its recipe says what travels when, its layouts what is
            sharded.
        spec: What it was built for.

    Raises:
        NotImplementedError: A slot is a gin reference in a scope, whose bindings have no public
            name.
    """
    recipe, mesh = strategy.config, strategy.mesh
    inside, across = mesh.shape[FSDP_AXIS], mesh.shape[DATA_AXIS]
    times, widths = _Times.of(recipe, spec), _Widths.of(recipe, spec)
    uses = _uses(strategy, spec)
    total = 0.0
    layouts = (strategy.shardings.params, strategy.shardings.slices)
    for held, piece in zip(*map(jax.tree.leaves, layouts), strict=True):
        count, own = math.prod(piece.split_shape), held.dtype.itemsize
        gathered, returned = widths.gathered or own, widths.returned or own
        sent = widths.sent or own
        reduced = 2 * count * sent  # a sum travels a ring twice
        if held.dim is not None:
            use = uses[held.path.split("/")[0]] if times.by_use else _Use(whole=1)
            # To look rows up, once: the gradient needs no table.
            again = use.whole * (2 if times.again else 1) + use.looked_up
            back = use.whole + use.looked_up
            moved = count * (again * gathered + back * returned)
            moved += use.rows * (held.shape[-1] * (gathered + returned) + inside * _INDEX)
            total += times.gathers * _ring(moved, inside)
            total += times.syncs * _ring(reduced / inside, across)
        elif piece.dim is not None:
            total += _ring(count * (times.syncs * sent + own), inside)
            total += times.syncs * _ring(reduced / inside, across)
        else:
            total += times.syncs * _ring(reduced, inside * across)
    return total


def _ring(nbytes: float, devices: int) -> float:
    return nbytes * (devices - 1) / devices


@dataclasses.dataclass(frozen=True)
class _Times:
    """How often a step does what.

    Attributes:
        gathers: Passes for which sharded parameters are gathered and their gradients scattered.
        syncs: Times that gradients are synchronised.
        again: Whether a pass gathers again for its backward half.
        by_use: Whether a pass gathers each unit where it is used, or everything beforehand.
    """

    gathers: int
    syncs: int
    again: bool
    by_use: bool

    @classmethod
    def of(cls, recipe: StrategyConfig, spec: TrainSpec) -> _Times:
        if recipe.reduction.logical_shards is not None:  # one sum over all that a device computes
            return cls(1, 1, again=False, by_use=False)
        micros = spec.accumulation_steps
        each = recipe.reshard_after_forward
        return cls(
            micros if each else 1,
            micros if recipe.sync_each == "micro_batch" else 1,
            again=each,
            by_use=bool(spec.model.units) and (each or micros == 1),
        )


@dataclasses.dataclass(frozen=True)
class _Widths:
    """Bytes of an element on the wire, as the slots' bindings say; None: the element's own.

    Attributes:
        gathered: In `gather`.
        returned: Of gradients on their way back from it.
        sent: Of gradients in `sync`.
    """

    gathered: int | None
    returned: int | None
    sent: int | None

    @classmethod
    def of(cls, recipe: StrategyConfig, spec: TrainSpec) -> _Widths:
        # `sync` takes sums of micro-batches as they were added up; what is scattered once for all
        # of them is a parameter's shard again.
        once = recipe.gather is not None and not recipe.reshard_after_forward
        adds = recipe.sync_each == "step" and spec.accumulation_steps > 1 and not once
        return cls(
            _width(_bound(recipe.gather, "gather_dtype")),
            _width(_bound(recipe.gather, "grad_scatter_dtype")),
            _width(_bound(recipe.sync, "dtype") or (recipe.accumulation_dtype if adds else None)),
        )


def _width(dtype: Any) -> int | None:
    return None if dtype is None else jnp.dtype(dtype).itemsize


def _bound(slot: Any, name: str) -> Any:
    """What a parameter of a slot's function is: bound with gin, or its default."""
    if slot is None:
        return None
    parameter = inspect.signature(slot).parameters.get(name)
    if parameter is None:
        return None
    function = slot.func if isinstance(slot, functools.partial) else slot
    if isinstance(slot, functools.partial) and name in slot.keywords:
        return slot.keywords[name]
    own = None if parameter.default is parameter.empty else parameter.default
    if _gin_knows(function):
        return gin.get_bindings(function).get(name, own)
    if _gin_knows(inspect.unwrap(function, stop=_gin_knows)):
        raise NotImplementedError(f"{function.__name__}: in a gin scope of its own")
    return own


def _gin_knows(function: Callable[..., Any]) -> bool:
    try:
        gin.get_bindings(function)
    except ValueError:
        return False
    return True


@dataclasses.dataclass
class _Use:
    """What a micro-batch makes of a unit.

    Attributes:
        whole: How often it is used whole.
        looked_up: How often rows are looked up in it, for which it is gathered.
        rows: How many rows a device looks up in it by exchange.
    """

    whole: int = 0
    looked_up: int = 0
    rows: int = 0


@dataclasses.dataclass(frozen=True)
class _Recorder(Units):
    """Units of whole parameters, which note what the model does with them."""

    found: dict[str, _Use] = dataclasses.field(default_factory=dict)
    exchanges: Callable[[str, int], bool] = lambda name, rows: False

    def run(self, function: Any, names: Any, params: PyTree, *args: Any, remat: str) -> Any:
        for name in names:
            self.found[name].whole += 1
        return super().run(function, names, params, *args, remat=remat)

    def scan(self, function: Any, name: str, *args: Any, **options: Any) -> Any:
        self.found[name].whole += 1
        return super().scan(function, name, *args, **options)

    def scan_rows(self, function: Any, name: str, *args: Any, **options: Any) -> Any:
        self.found[name].whole += 1
        return super().scan_rows(function, name, *args, **options)

    def look_up(self, name: str, params: PyTree, indices: jax.Array, dtype: Any) -> jax.Array:
        if self.exchanges(name, indices.size):
            self.found[name].rows += indices.size
        else:
            self.found[name].looked_up += 1
        (table,) = jax.tree.leaves(params[name])
        return take_rows(table, indices).astype(dtype)


def _uses(strategy: Strategy, spec: TrainSpec) -> dict[str, _Use]:
    """How a device's micro-batch uses each unit: the model's loss, asked and not computed."""
    model, recipe = spec.model, strategy.config
    if not model.units:
        return {}
    plain = recipe.gather if recipe.reduction is PLAIN else None  # see `Step`
    knows_rows = plain is not None and bool(slots.options_of(plain, {"rows": None}))

    def exchanges(name: str, rows: int) -> bool:
        places: list[LeafSharding] = jax.tree.leaves(strategy.shardings.params[name])
        split = model.units.get(name) == TABLE and places[0].dim == 1
        return knows_rows and split and rows < places[0].shape[0]

    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), strategy.abstract_state)
    seen = _Recorder(found={name: _Use() for name in state.params}, exchanges=exchanges)
    rows = spec.batch_size // spec.accumulation_steps // batch_devices(strategy.mesh)
    examples = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in spec.example.items()}

    def loss(params: PyTree, model_state: PyTree, examples: Any, position: jax.Array) -> Any:
        keys = example_keys(spec.seed, jnp.int32(0), position)
        more = {"units": seen, "train": True, "batch_axes": ()}
        return model.loss(params, model_state, examples, keys, **more).total

    places = jax.ShapeDtypeStruct((rows,), np.int32)
    jax.eval_shape(loss, state.params, state.model_state, examples, places)
    return seen.found
