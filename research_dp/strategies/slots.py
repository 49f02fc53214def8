"""The contracts of a strategy's functions, its slots, and how a step calls them.

A function that somebody wrote for xlstm-jax's `shard_params`, `gather_params` or `sync_gradients`,
or for MLX's optimizers, fills the slot unchanged.

What else a strategy decides comes by keyword, to functions that declare it by `collectives.takes`:

    reduction: The strategy's collectives (`Reduction`); `gather`, `sync`, `update`.
    devices: Sizes of the mesh axes, by name; `sync`, `update`.
    step: Number of steps done, 0-d int32; `sync`, `update`.
    key: A random key of the step, the same on all devices; `sync`, `update`.
    params: Parameters as they are between steps; `sync`.
    scale: A 0-d float32; gradients times it are those of the loss; `sync` with
        `sync_each = 'step'`.
    report: A function of a name and a 0-d number: a metric, 'sync/' before its name, the mean over
        devices; `sync` with `sync_each = 'step'`.
    shardings: `LeafSharding`s of gradients and optimizer state; `sync`, `update`.
    stored: `LeafSharding`s of the parameters between steps; `sync`, `update`.
    encoding: The codecs of what is sent, and which arrays they take (`codecs.Encoding`), if the
        strategy has any; `gather`, `sync`, `update`.
    rows: Row indices: only these rows of a feature-sharded table are returned; `gather`.
    mesh: Over which global arrays are sharded; `update`, and `gather` in engine `compiled`.
    units, on_decision, pads: See `shard_params`; `shard`.

`sync` and `update` may carry state, as Optax transforms do: see `Stateful`. Its `init` may take
`devices`, `key`, `shardings`, `stored` and `stacked` (a tree of bools: whether layers are the first
dim), its `resize` `devices`, `params`, `shardings` and `stored`. Gradients reach
a `sync` with state in the unit of the loss, whatever the loss scale and the weight of the batch, if
it is called once a step: `scale` is 1. With exact sums the unit is that of sums.

A `gather` or `sync` that sends something else than the elements of an array has a function
`wire_bytes(shape, dtype)`: bytes of what is gathered or all-reduced of an array of the shape that a
device has. It may take `devices`, `stacked`: whether layers are the first dim, and `sharding`: the
parameter's `LeafSharding`.

A slot of `gather`, `sync` or `update` whose attribute `algorithm` is a sentence, e.g. "parameters
are averaged each 8 steps", computes by design something else than the reference. A comparison of
runs reports the sentence in place of a difference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gin
import jax

from research_dp.distributed.boxed import unboxed, with_name
from research_dp.distributed.codecs import Codec
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.sharding import path_name
from research_dp.errors import binding_error, first_line
from research_dp.types import PyTree

NAMES = ("shard", "gather", "sync", "update")
# Options with which `sync` is called once a step, or micro-batch, for all parameters together.
OF_A_STEP = ("step", "key", "params", "scale", "report")


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
    those axes. Where some arrays differ and some do not, it is a tree prefix of the state, e.g.
    {"error": ("data", "fsdp"), "basis": ()}.

    A `sync` with a true attribute `by_unit` may be called for each unit of a model when its
    gradients are ready. Its state is then a mapping of trees nested like the parameters, whose
    arrays are floating-point. Those of a stack of layers have the layers as first dim. `apply` is
    given any tree of a unit's arrays, of all layers or one: `shardings` have the paths.
    """

    differs_over: PyTree

    def init(self, params: PyTree, **options: Any) -> PyTree:
        """Unsharded parameters -> the state of one device before the first step.

        What `sync` adds to local gradients must have their shapes: those of shards under `gather`.
        """

    def apply(self, *args: Any, state: PyTree, **options: Any) -> tuple[PyTree, PyTree]:
        """The slot's arguments and this device's state -> (what the slot returns, new state)."""

    def resize(self, state: PyTree, *args: Any, **options: Any) -> PyTree:
        """Global state -> the same for other devices, of the shapes that `init` gives there.

        It is given the number of devices over which the state differs, unless it takes options.
        UsageError: there is no way.

        A `sync` that adds to the next gradient what it did not send may have a method `pending` of
        the global state, which may take `devices`, `shardings` and `stored`: the part of the mean
        gradient, unsharded, that is not sent yet. `certify` checks that nothing is lost.
        """


class Events(NamedTuple):
    """What replicas do at a step that meet in parts: numbers of parts; None: nothing."""

    send: int | None = None  # from the state before the step, in its program
    receive: int | None = None  # at its end
    meet: int | None = None  # after it: sent and received by a program of its own


class Mean(Protocol):
    """What communicates: the mean over replicas."""

    def __call__(
        self, tree: Mapping[str, Any], dtype: Any = None, codec: Codec | None = None
    ) -> dict[str, Any]:
        """Arrays (replicas, ...) by the paths of parameters -> (...), summed in `dtype`.

        With a codec an `Encoded` of each: the mean, and (replicas, ...) what each has lost.
        """


@runtime_checkable
class OuterStep(Protocol):
    """Slot `outer`: what replicas do when they meet, of global arrays, outside of the map.

    The anchor are the parameters at which replicas met last; evaluation and checkpoints take them.
    `replicas` have a leading dim, `stored` are the `LeafSharding`s of parameters, and nothing
    communicates over replicas but `mean`. One that averages other dtypes than parameters' has a
    function `wire_bytes(shape, dtype)`: bytes all-reduced of an array that a device has. One that
    averages by a codec keeps what was lost as `state['lost'][str(number)]`, by path.
    """

    every: int  # In each so many steps the same happens once.

    def events(self, done: int) -> Events:
        """What happens at step `done`, of which the first is 1."""

    def init(self, anchor: PyTree, *, stored: PyTree, replicas: int) -> PyTree:
        """Parameters -> state: arrays of a parameter's shape and path, or replicated ones.

        Those of a parameter may have a leading dim, sharded over the replicas.
        """

    def send(
        self,
        anchor: PyTree,
        replicas: PyTree,
        state: PyTree,
        number: int,
        *,
        stored: PyTree,
        mean: Mean,
    ) -> PyTree:
        """New state, with a mean of replicas."""

    def receive(
        self, anchor: PyTree, replicas: PyTree, state: PyTree, number: int, *, stored: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """(anchor, replicas, state) -> the same, new, by what was sent last."""


def options_of(slot: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a strategy's options that a slot's function declares to take."""
    return {name: value for name, value in offered.items() if name in _taken(slot)}


def takes_any(slot: Any, *names: str) -> bool:
    """Whether a slot's function declares to take one of these options."""
    return not _taken(slot).isdisjoint(names)


def _taken(slot: Any) -> frozenset[str]:
    if slot is None:
        return frozenset()
    function = slot.apply if isinstance(slot, Stateful) else slot
    return frozenset(attribute(function, "takes") or ())


def bound_value(slot: Callable[..., Any] | Stateful | None, name: str) -> Any:
    """The value of a parameter of a slot's function: bound with gin, or its default.

    Raises:
        NotImplementedError: The function is in a gin scope of its own.
    """
    if isinstance(slot, Stateful):
        inner = getattr(slot, "func", None)
        return getattr(slot, name, None) if inner is None else bound_value(inner, name)
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


def is_by_unit(slot: Any) -> bool:
    """Whether a slot with state may be called for one unit of the model at a time."""
    return isinstance(slot, Stateful) and bool(getattr(slot, "by_unit", False))


def check_by_unit(name: str, state: PyTree, params: PyTree, stacked: PyTree) -> None:
    """Raises UsageError if state is not such that a unit, and a layer, has its own."""

    def check(param: jax.Array, is_stacked: bool, of_param: PyTree) -> None:
        for x in jax.tree.leaves(of_param):
            if not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
                raise ValueError(f"there are {x.dtype}")
            if is_stacked and x.shape[:1] != param.shape[:1]:
                raise ValueError(f"shape {x.shape} has not {param.shape[0]} layers first")

    try:
        for tree in state.values():
            jax.tree.map(check, params, stacked, tree)
    except (AttributeError, ValueError) as error:
        said = "a mapping of trees nested like the parameters, of floating-point arrays"
        problem = f".by_unit: its state is not {said}: {first_line(error)}"
        raise binding_error(f"data_parallel.{name}", problem) from error


def of_one_device(name: str, slot: Stateful, state: PyTree) -> PyTree:
    """State of a device without its leading dim."""
    return jax.tree.map(lambda x, axes: x[0] if axes else x, state, axes_of(name, slot, state))


def of_all_devices(name: str, slot: Stateful, new: PyTree, old: PyTree) -> PyTree:
    """The inverse, for new state; UsageError if it has not the types of the `old` one."""
    check_state(f"data_parallel.{name}", new, old)
    return jax.tree.map(lambda x, axes: x[None] if axes else x, new, axes_of(name, slot, new))


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
    state = of_one_device(name, slot, states[name])
    result, new = slot.apply(*args, state=state, **options)
    return unboxed(result), {**states, name: of_all_devices(name, slot, new, state)}


def axes_of(name: str, slot: Stateful, state: PyTree) -> PyTree:
    """The axes over which each array of a slot's state differs, in the state's structure.

    UsageError: `differs_over` is neither axes nor a tree prefix of the state.
    """

    def each(axes: Any, part: PyTree) -> PyTree:
        if not are_axes(axes):
            raise ValueError(f"{axes!r} is no tuple of axes")
        return jax.tree.map(lambda _: tuple(axes), part)

    try:
        return jax.tree.map(each, slot.differs_over, state, is_leaf=are_axes)
    except (TypeError, ValueError) as error:
        problem = f".differs_over is no tree prefix of the state: {first_line(error)}"
        raise binding_error(f"data_parallel.{name}", problem) from error


def are_axes(x: Any) -> bool:
    """Whether it is a sequence of names, as a leaf of `differs_over` is."""
    return isinstance(x, (tuple, list)) and all(isinstance(one, str) for one in x)


def check_state(binding: str, new: PyTree, old: PyTree, who: str = "its new state has") -> None:
    """Raises UsageError if a step returned state that is not of the old one's types."""

    def types(tree: PyTree) -> list[str]:
        flat = [(path, jax.typeof(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
        return [f"{path_name(path) or 'state'} {x.dtype}{[*x.shape]}" for path, x in flat]

    structures: Any = map(jax.tree.structure, (new, old))
    if types(new) != types(old) or len(set(structures)) > 1:
        returned = next((x for x in types(new) if x not in types(old)), "another structure")
        expected = next((x for x in types(old) if x not in types(new)), "that of `init`")
        problem = f": {who} {returned} instead of {expected}. Return what `init` does."
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
