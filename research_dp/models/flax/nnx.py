"""Flax NNX modules as pure functions on plain dicts."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from research_dp.argument_checks import checked
from research_dp.distributed.batch_examples import seed_key
from research_dp.distributed.collectives import Axes
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError, some_of
from research_dp.models.flax import module_calls as calls
from research_dp.models.flax.module_calls import GUIDE, Inputs
from research_dp.models.flax.module_units import Leaves, UnitCalls
from research_dp.types import Functions, PyTree

_is_state = nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))


@checked
def nnx_functions(factory: Callable[..., nnx.Module]) -> Functions:
    """Pure `init` and `apply` of an NNX module.

    `research_dp.from_nnx`, which adds a loss, says what is accepted. `factory` is (shape of the
    input of one example, rngs) -> module. Its `__call__` takes x, an array or a tree, and may take
    `keys` and `batch_axes` as in `linen_functions`. Variables other than `nnx.Param` are model
    state.
    """

    def build(x: PyTree, rngs: nnx.Rngs) -> nnx.Module:
        return factory(jax.tree.map(lambda a: tuple(a.shape[1:]), x), rngs)

    return _functions(build, None)


def nnx_functions_of_inputs(
    factory: Callable[..., nnx.Module], inputs: Inputs, *, rngs: calls.Streams = ()
) -> Functions:
    """`nnx_functions` of a factory (rngs) -> module, on these inputs."""
    return _functions(_of_rngs(factory), inputs, rngs, calls.SOWN)


def _functions(
    build: Callable[[PyTree, nnx.Rngs], nnx.Module],
    inputs: Inputs | None,
    streams: calls.Streams = (),
    sown: tuple[str, ...] = (),
) -> Functions:
    """Pure `init` and `apply` of the module that `build` makes for inputs.

    An argument such as `train` or `deterministic` says whether the module trains; without one its
    methods `train` and `eval` are called. Dropout layers have one mask per example. BatchNorm has
    the statistics of the global micro-batch. With `streams`, which the module draws from, each
    example is called by itself. What is `sown` is returned with the new state.
    """

    def rngs_of(key: jax.Array) -> nnx.Rngs:
        return nnx.Rngs(key, **calls.named_keys(streams, key))

    def abstract(x: PyTree) -> tuple[nnx.Module, calls.ModuleCall]:
        with nnx.use_eager_sharding(False):  # strategies shard, as they do modules of Linen
            module = _abstract(lambda: build(x, rngs_of(seed_key(0))))
        return module, calls.ModuleCall(module.__call__, type(module).__name__, inputs)

    def init(key: jax.Array, x: PyTree) -> tuple[PyTree, PyTree]:
        abstract(x)  # refuses a module that cannot be called
        with nnx.use_eager_sharding(False):
            return nnx_variables(build(x, rngs_of(key)))

    def apply(
        params: PyTree,
        model_state: PyTree,
        x: PyTree,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: Axes = (),
        units: UnitCalls | None = None,
    ) -> tuple[jax.Array, PyTree]:
        empty, call = abstract(x)

        def one(x: PyTree, keys: Any, axes: Axes, draw: jax.Array | None) -> tuple[Any, PyTree]:
            given = call.arguments(x, train=train, keys=keys, batch_axes=axes)
            module = _filled(empty, params, model_state, draw)
            if not call.modes:
                module.train() if train else module.eval()
            _over_the_batch(module, keys, axes, train, own_draws=draw is not None)
            if units is not None:
                _in_units(module, units)
            with calls.clear_errors(call.name, train=train), nnx.use_eager_sharding(False):
                y = module(*given.args, **given.kwargs)
            many = None if streams else x
            popped = {kind: nnx.to_pure_dict(nnx.pop(module, _sown_type(kind))) for kind in sown}
            found = {kind: calls.numbers_sown(values, many) for kind, values in popped.items()}
            return y, {**(nnx_variables(module)[1] if train else model_state), **found}

        return calls.called(one, x, keys, batch_axes, train=train, draws=bool(streams))

    return Functions(init, apply)


def _of_rngs(factory: Callable[..., nnx.Module]) -> Callable[[PyTree, nnx.Rngs], nnx.Module]:
    """A function (x, rngs) of a factory that takes `rngs` alone, by name or by position."""
    if isinstance(factory, nnx.Module):
        name = type(factory).__name__
        raise UsageError(
            f"from_nnx.factory is a module, {name}. Give a function that makes it, e.g. "
            f"lambda rngs: {name}(..., rngs=rngs): parameters are then sharded from the start."
        )
    # A class of NNX has the signature (*args, **kwargs): bound, its constructor has its own.
    is_class = inspect.isclass(factory)
    signature = inspect.signature(factory.__init__.__get__(factory) if is_class else factory)
    for args, options in (((), {"rngs": None}), ((None,), {})):
        try:
            signature.bind(*args, **options)
        except TypeError:
            continue
        return lambda _, rngs: factory(rngs=rngs) if options else factory(rngs)
    name = getattr(factory, "__name__", "factory")
    raise UsageError(
        f"from_nnx calls {name}{signature} with rngs alone. Give a function of rngs, e.g. "
        f"lambda rngs: {name}(..., rngs=rngs). {GUIDE}"
    )


def _abstract(build: Callable[[], nnx.Module]) -> nnx.Module:
    """The module with shapes instead of arrays; UsageError if it cannot be rebuilt from them."""

    def checked_module() -> nnx.Module:
        module = build()
        if not isinstance(module, nnx.Module):
            raise UsageError(f"factory returns {type(module).__name__}, no nnx.Module. {GUIDE}")
        state = {path for path, _ in nnx.to_flat_state(nnx.state(module))}
        for path, value in nnx.iter_graph(module):
            if isinstance(value, jax.Array) and path not in state:
                raise UsageError(
                    f"{type(module).__name__}.{'.'.join(map(str, path))} is an array that is no "
                    "variable. Wrap it where it is assigned: nnx.data(...) or nnx.Variable(...), "
                    f"which are model state, or nnx.Param(...), which is trained. {GUIDE}"
                )
        return module

    return nnx.merge(*jax.eval_shape(lambda: nnx.split(checked_module())))


@checked
def nnx_variables(module: nnx.Module | nnx.State) -> tuple[PyTree, PyTree]:
    """Parameters and model state of an NNX module, or of its `nnx.state`, as `TrainState` has them.

    They are nested dicts of arrays, whose keys are texts. Random streams are left out.
    """
    all_ = nnx.state(module) if isinstance(module, nnx.Module) else module
    params, state = (_by_text(nnx.filter_state(all_, kind)) for kind in (nnx.Param, _is_state))
    return params, state


@checked
def update_nnx(
    module: nnx.Module,
    params: Mapping[str, Any],
    model_state: Mapping[str, Any] | None = None,
) -> None:
    """Gives an NNX module these parameters and this model state: the reverse of `nnx_variables`.

    Raises:
        UsageError: Their paths are not those of the module.
    """
    _, _, variables = nnx.split(module, nnx.RngState, ...)  # type: ignore[misc]
    given = by_path(params) | by_path(model_state or {})
    own = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(variables)}
    if apart := sorted(own ^ given.keys()):
        raise UsageError(
            f"update_nnx: params and model_state have other paths than {type(module).__name__}: "
            f"only one has {some_of(apart, 5)}."
        )
    nnx.replace_by_pure_dict(variables, unflatten_dict(given, sep="/"))
    nnx.update(module, variables)


def _by_text(state: Any) -> PyTree:
    flat = flatten_dict(nnx.to_pure_dict(state))
    return unflatten_dict({tuple(map(str, path)): x for path, x in flat.items()})


def _sown_type(kind: str) -> type[nnx.Variable[Any]]:
    return nnx.variable_type_from_name(kind, allow_register=True)


def _filled(
    abstract: nnx.Module, params: PyTree, model_state: PyTree, key: jax.Array | None = None
) -> nnx.Module:
    """The module with these variables; its random streams only say which layer draws.

    With a `key`, that of an example, they draw.
    """
    graphdef, streams, variables = nnx.split(abstract, nnx.RngState, ...)  # type: ignore[misc]
    merged = flatten_dict(params) | flatten_dict(model_state)
    nnx.replace_by_pure_dict(variables, unflatten_dict(merged))
    leaves, treedef = jax.tree.flatten(streams)
    filled = [
        (calls.layer_keys if key is None else functools.partial(_keys_of, key))(number, x.shape)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else jnp.zeros(x.shape, x.dtype)
        for number, x in enumerate(leaves)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, filled), variables)


def _keys_of(key: jax.Array, number: int, shape: tuple[int, ...]) -> jax.Array:
    own = jax.random.fold_in(key, number)
    return jax.random.split(own, shape) if shape else own


def _over_the_batch(
    module: nnx.Module, keys: jax.Array | None, axes: Axes, train: bool, *, own_draws: bool
) -> None:
    """Prepares the layers that compute with several examples, for one call of the module.

    `keys` (B,) are the examples' keys, and `axes` the bound axes that the batch is split over.
    `own_draws`: each example is called by itself, so that layers draw as they are.
    """
    keys_of_batch = _Keys(keys)
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, nnx.BatchNorm):
            layer.axis_name = axes or None  # type: ignore[assignment]
            layer.__class__ = _checking(type(layer))
            layer.trains = train  # type: ignore[attr-defined]
        if own_draws:
            continue
        if type(layer) is nnx.Dropout:
            layer.__class__ = _ExampleDropout
            layer.keys_of_batch = keys_of_batch  # type: ignore[attr-defined]
        if getattr(layer, "attention_fn", None) is nnx.dot_product_attention:
            by_example = calls.example_attention(nnx.dot_product_attention, keys)
            layer.attention_fn = by_example  # type: ignore[attr-defined]


def _in_units(module: nnx.Module, units: UnitCalls) -> None:
    """Prepares the submodules that are units, whose calls are programs of their own."""
    for names, layer in nnx.iter_modules(module):
        path = "/".join(map(str, names))
        if path and units.is_unit(layer, path):
            layer.__class__ = _unit_class(type(layer))
            layer.unit = _Unit(path, units)  # type: ignore[attr-defined]


class _Unit:
    """Where a unit is, and what runs its calls; a static attribute to transforms of NNX."""

    def __init__(self, path: str, calls: UnitCalls):
        self.path, self.calls = path, calls


def _is_stateful(x: Any) -> bool:
    return isinstance(x, nnx.Module | nnx.Variable | nnx.Rngs | nnx.RngStream)


@functools.cache
def _unit_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    """A subclass whose `__call__` is a program of its own."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        unit = self.unit
        # What it is given that has state, such as a cache, is changed by the call too.
        leaves, treedef = jax.tree.flatten((args, options), is_leaf=_is_stateful)
        given = {i: x for i, x in enumerate(leaves) if _is_stateful(x)}
        own = nnx.All(nnx.Param, nnx.PathContains("self"))
        both = nnx.Dict({"self": self, **{f"given {i}": x for i, x in given.items()}})
        graphdef, state, others = nnx.split(both, own, ...)  # type: ignore[misc]

        def computed(params: Leaves) -> Any:
            nnx.replace_by_pure_dict(state, {"self": unflatten_dict(params)})
            both = nnx.merge(graphdef, state, others, copy=True)
            new = [both[f"given {i}"] if i in given else x for i, x in enumerate(leaves)]
            args, options = jax.tree.unflatten(treedef, new)
            y = kind.__call__(both["self"], *args, **options)
            return y, nnx.state(both, nnx.Not(own))

        y, others = unit.calls.run(unit.path, computed, flatten_dict(_by_text(state)["self"]))
        nnx.update(both, others)
        return y

    return types.new_class(kind.__name__, (kind,), {}, lambda body: body.update(__call__=call))


class _Keys:
    """The examples' keys (B,), or None, of one call.

    Transforms of NNX see it as a static attribute: they neither slice nor cache the keys.
    """

    def __init__(self, keys: jax.Array | None):
        self.keys = keys


class _ExampleDropout(nnx.Dropout):
    """`nnx.Dropout` with one mask per example."""

    keys_of_batch: _Keys

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
    ) -> jax.Array:
        off = self.deterministic if deterministic is None else deterministic
        stream = self.rngs if rngs is None else rngs
        if off is None or off or self.rate in (0.0, 1.0) or stream is None:
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        if isinstance(stream, nnx.Rngs):
            stream = stream[self.rng_collection]
        layer_key = stream if isinstance(stream, jax.Array) else stream()
        keys = self.keys_of_batch.keys
        return calls.layer_dropout(inputs, self.rate, keys, layer_key, self.broadcast_dims)


class _BatchNorm(nnx.BatchNorm):
    """`nnx.BatchNorm` that refuses a mask, and statistics of a batch in evaluation."""

    trains: bool

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        calls.check_batch_norm(mask)
        running = self.use_running_average if use_running_average is None else use_running_average
        if not (self.trains or running):
            raise UsageError(
                "nnx.BatchNorm takes statistics of the batch in evaluation. Give it "
                f"use_running_average=True there, by an argument `train` of the model. {GUIDE}"
            )
        return super().__call__(x, use_running_average)


@functools.cache
def _checking(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """`_BatchNorm`, or a subclass of `nnx.BatchNorm` whose `super()` is `_BatchNorm`."""
    if kind is nnx.BatchNorm:
        return _BatchNorm
    return types.new_class(kind.__name__, (kind, _BatchNorm))
