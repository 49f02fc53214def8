"""The contracts of a strategy's four functions, its slots, and how a step calls them.

A function that somebody wrote for xlstm-jax's `shard_params`, `gather_params` or `sync_gradients`,
or for MLX's optimizers, fills the slot unchanged.

What else a strategy decides comes by keyword, to functions that declare it by `collectives.takes`:

    reduction: The strategy's collectives (`Reduction`); `gather`, `sync`, `update`.
    shardings: `LeafSharding`s of gradients and optimizer state; `sync`, `update`.
    stored: `LeafSharding`s of the parameters between steps; `update`.
    rows: Row indices: only these rows of a feature-sharded table are returned; `gather`.
    mesh: Over which global arrays are sharded; `update`, and `gather` in engine `compiled`.
    units, on_decision, pads: See `shard_params`; `shard`.

`sync` and `update` may carry state, as Optax transforms do: see `Stateful`.

A slot of `gather`, `sync` or `update` whose attribute `algorithm` is a sentence, e.g. "parameters
are averaged each 8 steps", computes by design something else than the reference. A comparison of
runs reports the sentence in place of a difference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import gin
import jax

from research_dp.distributed.boxed import unboxed, with_name
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.sharding import path_name
from research_dp.errors import binding_error
from research_dp.types import PyTree


class Shard(Protocol):
    """Decides which parameters are sharded; e.g. `shard_params`.

    It is traced inside mapped axes, and never run: the engine takes the dims from the boxes. A
    stack of layers is passed as one layer.
    """

    def __call__(self, params: PyTree, axis_name: str) -> PyTree:
        """Replicated parameters -> local shards, in `nn.Partitioned`s that name the axis."""


class Gather(Protocol):
    """All-gathers parameters for compute; e.g. `gather_params`."""

    def __call__(self, params: PyTree, axis_name: str) -> PyTree:
        """Boxed local shards -> unsharded parameters.

        Their gradients come back as boxed shards of the mean over the axis.
        """


class Sync(Protocol):
    """Averages gradients over devices; e.g. `sync_gradients`, `scatter_gradients`."""

    def __call__(self, grads: PyTree, axis_names: tuple[str, ...]) -> PyTree:
        """Local gradients, boxed where sharded -> averages, of the shapes that `update` takes."""


class Update(Protocol):
    """Applies the optimizer; e.g. `apply_gradients`, `fsdp_apply_gradients`.

    It is called outside of the map, with global arrays: no mesh axis is bound.
    """

    def __call__(self, gradients: PyTree, parameters: PyTree, optimizer: Any) -> PyTree:
        """(averaged gradients, parameters, object with `apply_gradients`) -> new parameters."""


@runtime_checkable
class Stateful(Protocol):
    """A slot with state: an object with these methods in place of a function.

    `differs_over` are the mesh axes over which the state differs from device to device; () if it is
    the same on all, as that of `update` is. The state is then a global array with a leading dim for
    those axes.
    """

    differs_over: tuple[str, ...]

    def init(self, params: PyTree) -> PyTree:
        """Unsharded parameters -> the state of one device before the first step.

        What `sync` adds to local gradients must have their shapes: those of shards under `gather`.
        """

    def apply(self, *args: Any, state: PyTree, **options: Any) -> tuple[PyTree, PyTree]:
        """The slot's arguments and this device's state -> (what the slot returns, new state)."""

    def resize(self, state: PyTree, devices: int) -> PyTree:
        """Global state -> the same for another number of devices; UsageError if there is none."""


def options_of(slot: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a strategy's options that a slot's function declares to take."""
    function = slot.apply if isinstance(slot, Stateful) else slot
    taken = attribute(function, "takes") or ()
    return {name: value for name, value in offered.items() if name in taken}


def bound_value(slot: Callable[..., Any] | Stateful | None, name: str) -> Any:
    """The value of a parameter of a slot's function: bound with gin, or its default.

    Raises:
        NotImplementedError: The function is in a gin scope of its own.
    """
    if isinstance(slot, Stateful):
        return getattr(slot, name, None)
    parameter = slot and inspect.signature(slot).parameters.get(name)
    if slot is None or parameter is None:
        return None
    default = None if parameter.default is parameter.empty else parameter.default
    if isinstance(slot, functools.partial):
        if name in slot.keywords:
            return slot.keywords[name]
        slot = slot.func
    if _is_registered(slot):
        return gin.get_bindings(slot).get(name, default)
    if _is_registered(inspect.unwrap(slot, stop=_is_registered)):
        raise NotImplementedError(f"{slot.__name__}: in a gin scope of its own")
    return default


def _is_registered(function: Callable[..., Any]) -> bool:
    try:
        gin.get_bindings(function)
    except ValueError:
        return False
    return True


def attribute(slot: Any, name: str) -> Any:
    """An attribute of a slot, or of the function that a partial or a wrapper calls; else None."""
    while not hasattr(slot, name):
        inner = getattr(slot, "func", None) or getattr(slot, "__wrapped__", None)
        if inner is None:
            return None
        slot = inner
    return getattr(slot, name)


def algorithm(filled: Mapping[str, Any]) -> str | None:
    """What slots, by name, compute by design instead of the reference's step; None: the same."""
    sentences = dict.fromkeys(_algorithm(name, slot) for name, slot in filled.items())
    return "; ".join(x for x in sentences if x) or None


def _algorithm(name: str, slot: Any) -> str | None:
    sentence = attribute(slot, "algorithm")
    if sentence is not None and not isinstance(sentence, str):
        problem = f": its attribute `algorithm` is {sentence!r}. Give a sentence, a str."
        raise binding_error(f"data_parallel.{name}", problem)
    return sentence


def call_in(
    states: PyTree, name: str, slot: Callable[..., PyTree] | Stateful, *args: Any, **offered: Any
) -> tuple[PyTree, PyTree]:
    """Calls a slot with the options that it declares: (what it returns, new states of the slots).

    `states` are those of this device, by slot: with a leading dim of length 1 if they differ from
    device to device.
    """
    options = options_of(slot, offered)
    if not isinstance(slot, Stateful):
        return unboxed(slot(*args, **options)), states
    differs = bool(slot.differs_over)
    state = jax.tree.map(lambda x: x[0], states[name]) if differs else states[name]
    result, new = slot.apply(*args, state=state, **options)
    check_state(f"data_parallel.{name}", new, state)
    new = jax.tree.map(lambda x: x[None], new) if differs else new
    return unboxed(result), {**states, name: new}


def check_state(binding: str, new: PyTree, old: PyTree) -> None:
    """Raises UsageError if a step returned state that is not of the old one's types."""

    def types(tree: PyTree) -> list[str]:
        flat = [(path, jax.typeof(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
        return [f"{path_name(path) or 'state'} {x.dtype}{[*x.shape]}" for path, x in flat]

    structures: Any = map(jax.tree.structure, (new, old))
    if types(new) != types(old) or len(set(structures)) > 1:
        returned = next((x for x in types(new) if x not in types(old)), "another structure")
        expected = next((x for x in types(old) if x not in types(new)), "that of `init`")
        problem = f": its new state has {returned} instead of {expected}. Return what `init` does."
        raise binding_error(binding, problem)


def in_boxes(tree: PyTree, shardings: PyTree) -> PyTree:
    """Arrays that are sharded over `fsdp` in boxes that name it at their dim."""

    def one(x: jax.Array, sharding: Any) -> Any:
        return x if sharding.dim is None else with_name(x, x, sharding.dim, FSDP_AXIS)

    return jax.tree.map(one, tree, shardings)


def check_shapes(slot: str, what: str, tree: PyTree, like: PyTree) -> None:
    """Raises UsageError if a slot's function returned arrays of other shapes than `like`."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), expected in zip(flat, jax.tree.leaves(like), strict=True):
        shape = getattr(expected, "local_shape", expected.shape)
        if x.shape != shape:
            raise binding_error(
                f"data_parallel.{slot}",
                f" leaves {what} {path_name(path)} with shape {x.shape}, not {shape}. "
                "The four slots must fit each other.",
            )
