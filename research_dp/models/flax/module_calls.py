"""What modules of Linen and NNX share: how they are called, BatchNorm, dropout.

Inputs are given by position or by name, the mode by name. Flax draws a dropout mask of a batch from
one key: its values for an example would depend on the devices that share the batch. Here each
example has its own key. Flax's key only says which layer draws, at which call and in which turn of
a loop: it can be split, but nothing can be drawn from it. A module that draws otherwise is called
for each example by itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError, ModifyScopeVariableError
from jax.extend import random

from research_dp.distributed.batch_examples import of_one_example, seed_key
from research_dp.distributed.collectives import Axes
from research_dp.distributed.jaxpr import line_of
from research_dp.errors import UsageError
from research_dp.models.flax.module_units import split_arrays
from research_dp.types import Batch, PyTree

# Arguments that say whether a module trains -> their value while it does.
MODES = {
    "train": True,
    "training": True,
    "is_train": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
# Other names that arguments with this meaning have; they are refused.
_OTHER_MODES = ("mode", "eval", "evaluate", "evaluating", "inference", "test", "testing")
GUIDE = "See docs/own_model.md."
# The array of a batch that a module takes, or several; arguments by name, with the arrays' names or
# constants; or what makes the argument of a batch.
Inputs = str | Sequence[str] | Mapping[str, Any] | Callable[[Mapping[str, Any]], Any]
Streams = str | Sequence[str]
# Collections of variables that `sow` fills anew at each call.
SOWN = ("losses", "metrics")
_EXAMPLE = "example of research_dp"  # the axis along which each example has a call of its own


class Given(NamedTuple):
    """Arguments of a call that somebody has written out."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def inputs_of(inputs: Inputs, batch: Batch) -> Any:
    """What a module is given of a batch: an array, a tuple of some, or a dict of some."""
    if isinstance(inputs, str):
        return batch[inputs]
    if isinstance(inputs, Mapping):
        return {name: batch[name] for name in names_of(inputs)}
    if callable(inputs):
        return {name: x for name, x in batch.items() if name != "mask"}
    return tuple(batch[name] for name in inputs)


def names_of(inputs: Inputs) -> list[str]:
    """The arrays that it names; [] if that is not known."""
    if isinstance(inputs, Mapping):
        return list(dict.fromkeys(x for x in inputs.values() if isinstance(x, str)))
    return [] if callable(inputs) else [inputs] if isinstance(inputs, str) else list(inputs)


def mode_options(names: Sequence[str], train: bool) -> dict[str, bool]:
    """The values of these arguments, in training or in evaluation."""
    return {name: MODES[name] == train for name in names}


class ModuleCall:
    """How a module called `name` is called with these inputs.

    `modes` are its arguments that say whether it trains. It is given `keys` and `batch_axes`, as in
    `linen_functions`, if it names them. `inputs` None: one input, for `linen_functions` itself;
    then a module with `**options` gets them, and `train`, too.

    Raises:
        UsageError: It does not take the inputs, or another of its arguments may be a mode, which
            would keep its default.
    """

    def __init__(self, call: Callable[..., Any], name: str, inputs: Inputs | None):
        self.name, self._signature = name, inspect.signature(call)
        self._inputs = inputs
        by_name = list(inputs) if isinstance(inputs, Mapping) else None
        if inputs is not None and not callable(inputs) and not names_of(inputs):
            raise UsageError(f"inputs = {inputs!r} names no array of a batch. {GUIDE}")
        names = ["x"] if inputs is None else by_name or names_of(inputs) or ["batch"]
        parameters = self._signature.parameters
        takes_any = inspect.Parameter.VAR_KEYWORD in {p.kind for p in parameters.values()}
        gets_all = inputs is None and takes_any
        self.modes = [mode for mode in MODES if mode in parameters] or ["train"] * gets_all
        self._others = [x for x in ("keys", "batch_axes") if x in parameters or gets_all]
        try:
            bound = self.arguments(self._nothing(), train=True)
        except TypeError as error:
            advice = "Name its arrays by inputs=(...), in its order"
            if inputs is None:
                advice = "research_dp.from_linen and from_nnx take several arrays, by inputs=(...)"
            modes = (f"{mode}=..." for mode in self.modes)
            raise UsageError(
                f"{name}.__call__{self._signature} cannot be called with "
                f"({', '.join([*names, *modes])}): {error}. {advice}. Give other arguments a "
                f"default. {GUIDE}"
            ) from error
        given = {*bound.arguments, *(by_name or ())}
        for other, parameter in parameters.items():
            # With a mode that is known, a flag such as `decode` may keep its default.
            is_unknown = not self.modes and isinstance(parameter.default, bool)
            is_mode = is_unknown or other in _OTHER_MODES
            if is_mode and other not in given:
                raise UsageError(
                    f"{name}.__call__{self._signature} would always be called with {other} = "
                    f"{parameter.default!r}. If it says whether the module trains, name it one of "
                    f"{', '.join(MODES)}. If not, make it a field of the module. {GUIDE}"
                )

    def arguments(
        self, x: Any, *, train: bool, keys: Any = None, batch_axes: Any = ()
    ) -> inspect.BoundArguments:
        """Its arguments, by position where they can be: `remat` needs that of static ones.

        `x` is as `inputs_of` makes it, or the arguments themselves.
        """
        others = {"keys": keys, "batch_axes": batch_axes}
        options = mode_options(self.modes, train) | {name: others[name] for name in self._others}
        args, kwargs = x if isinstance(x, Given) else self._given(x)
        return self._signature.bind(*args, **{**options, **kwargs})

    def _given(self, x: Any) -> Given:
        inputs = self._inputs
        if isinstance(inputs, Mapping):
            named = {k: x[v] if isinstance(v, str) else v for k, v in inputs.items()}
            return Given((), named)
        if inputs is None or isinstance(inputs, str):
            return Given((x,), {})
        return Given((inputs(x),) if callable(inputs) else tuple(x), {})

    def _nothing(self) -> Given:
        """Arguments for the signature alone."""
        inputs = self._inputs
        if isinstance(inputs, Mapping):
            return Given((), dict.fromkeys(inputs))
        if inputs is None or isinstance(inputs, str) or callable(inputs):
            return Given((None,), {})
        return Given((None,) * len(inputs), {})


@contextlib.contextmanager
def clear_errors(name: str, *, train: bool) -> Iterator[None]:
    """Says what to change where a call of the module called `name` raises errors of Flax or JAX."""
    try:
        yield
    except InvalidRngError as error:
        found = re.search(r'PRNG for "(.*?)"', str(error))
        stream = found[1] if found else "params"
        advice = f"Name it: rngs={stream!r}; each example is then called by itself."
        if not train:
            advice = (
                "Give its dropout layers deterministic=True there, by an argument `train`; or, if "
                f"it is to draw there, name the stream: rngs={stream!r}."
            )
        raise UsageError(
            f"{name} draws from the RNG stream {stream!r} of Flax in "
            f"{'training' if train else 'evaluation'}, at {line_of(error)}. {advice} {GUIDE}"
        ) from error
    except ModifyScopeVariableError as error:
        if train:
            raise
        raise UsageError(
            f"{name} changes its variables in evaluation. Give nn.BatchNorm "
            f"use_running_average=True there, by an argument `train` of {name}. {GUIDE}"
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        axis = str(error).partition("axis name: ")[2].partition(".")[0]
        raise UsageError(
            f"{name} communicates along axis {axis!r}, which no mesh here has, at "
            f"{line_of(error)}. Let it take `batch_axes`, the axes of the batch. {GUIDE}"
        ) from error


def check_batch_norm(mask: Any) -> None:
    """Raises UsageError for a BatchNorm whose statistics cannot be those of all devices."""
    if mask is not None:
        raise UsageError(
            "BatchNorm with a mask: devices would have unequal numbers of values, and Flax "
            f"averages their means with equal weights. Leave the mask out. {GUIDE}"
        )


def example_dropout(
    x: jax.Array, rate: float, keys: jax.Array, broadcast_dims: Sequence[int] = ()
) -> jax.Array:
    """Sets a fraction of each example's features to zero and scales up the rest.

    `keys` (B,) are the examples' keys for this layer. Masks have length 1 in `broadcast_dims`.
    """
    dims = [dim % x.ndim for dim in broadcast_dims]
    shape = tuple(1 if dim in dims else length for dim, length in enumerate(x.shape))[1:]
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(keys)
    return jnp.where(jnp.broadcast_to(keep, x.shape), x / (1.0 - rate), jnp.zeros((), x.dtype))


def layer_dropout(
    x: jax.Array,
    rate: float,
    keys: jax.Array | None,
    layer_key: jax.Array,
    broadcast_dims: Sequence[int] = (),
) -> jax.Array:
    """`example_dropout` of a layer that Flax gives this key; `keys` (B,) are the examples' own.

    Raises:
        UsageError: As `_keys_of_layer`, or the layer has one mask for all examples.
    """
    keys = _keys_of_layer(jnp.shape(x), keys, layer_key)
    if any(dim % x.ndim == 0 for dim in broadcast_dims):
        raise UsageError(
            f"a dropout layer has broadcast_dims = {tuple(broadcast_dims)}: one mask for all "
            "examples, which would depend on the device. Leave dim 0 out."
        )
    return example_dropout(x, rate, keys, broadcast_dims)


def example_attention(attention: Callable[..., Any], keys: jax.Array | None) -> Callable[..., Any]:
    """Flax's `dot_product_attention` with a dropout mask per example; `keys` (B,) are theirs.

    It is called as modules call it. `broadcast_dropout` means what it means in Flax for one
    example: its heads, and its batch dims after the first, share a mask.
    """

    @functools.wraps(attention)  # Linen gives it the arguments that its signature names
    def by_example(query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        rng = options.pop("dropout_rng", None)
        if options.get("deterministic") or not options.get("dropout_rate"):
            return attention(query, key, value, mask=mask, **options)
        keys_of_layer = _keys_of_layer(query.shape, keys, rng, min_ndim=4)
        options.pop("module", None)  # it would keep weights of within `vmap`
        whole = mask is not None and mask.ndim == query.ndim  # if not, examples share it
        if whole:
            mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))

        def of_one(q: Any, k: Any, v: Any, mask: Any, rng: Any) -> Any:
            return attention(q, k, v, mask=mask, dropout_rng=rng, **options)

        in_axes = (0, 0, 0, 0 if whole else None, 0)
        return jax.vmap(of_one, in_axes)(query, key, value, mask, keys_of_layer)

    return by_example


def _keys_of_layer(
    shape: tuple[int, ...], keys: jax.Array | None, layer_key: jax.Array, min_ndim: int = 1
) -> jax.Array:
    """The examples' keys (B,) for a layer that Flax gives this key and an array of this shape.

    Raises:
        UsageError: There are no keys (evaluation), or the layer does not see the batch as its
            first dim.
    """
    if keys is None:
        raise UsageError(
            "a dropout layer draws in evaluation. Give it deterministic=True there, by an argument "
            f"`train` of the model. {GUIDE}"
        )
    if len(shape) < min_ndim or shape[0] != keys.shape[0]:
        raise UsageError(
            f"a dropout layer gets an array {shape} in a batch of {keys.shape[0]} examples. Its "
            f"first dim must be the batch, because each example has its own mask. {GUIDE}"
        )
    numbers = layer_key
    if jnp.issubdtype(layer_key.dtype, jax.dtypes.prng_key):
        numbers = jax.random.key_data(layer_key)
    for number in jnp.ravel(numbers):
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    return keys


def layer_keys(number: int, shape: tuple[int, ...] = ()) -> jax.Array:
    """Keys of this shape that say which layer draws; another number gives others."""
    key = jax.random.key(number, impl=_layers())
    return jax.random.split(key, shape) if shape else key


@functools.cache
def _layers() -> Any:
    """Random keys that can be split and folded, from which nothing can be drawn."""
    plain = random.threefry_prng_impl
    return random.define_prng_impl(
        key_shape=plain.key_shape,
        seed=plain.seed,
        split=plain.split,
        fold_in=plain.fold_in,
        random_bits=_refuse,
        name="layers",
        tag="layer",
    )


def _refuse(*_: Any) -> Any:
    raise UsageError(
        "the model draws random numbers from an RNG stream of Flax other than by a dropout layer"
        ", e.g. in an attention_fn of its own. They would depend on the device. Name the stream, "
        f"e.g. rngs='dropout': each example is then called by itself. {GUIDE}"
    )


def numbers_sown(tree: PyTree, x: Any) -> dict[str, jax.Array]:
    """What was sown into a collection: sums over calls and layers, 0-d float32, by path.

    Raises:
        UsageError: An array may have a number for each example of the input `x`; None: it cannot.
    """
    examples = next((len(array) for array in split_arrays(x)[0] if jnp.ndim(array)), None)
    found: dict[str, jax.Array] = {}
    for keys, x in jax.tree_util.tree_leaves_with_path(tree):
        names = [str(k.key) for k in keys if isinstance(k, jax.tree_util.DictKey)]
        path = "/".join(names)
        if examples is not None and jnp.shape(x)[:1] == (examples,):
            raise UsageError(
                f"{path} is sown with shape {jnp.shape(x)}, which may be one number for each of "
                f"{examples} examples. Sow a number: the mean over them. {GUIDE}"
            )
        found[path] = found.get(path, jnp.float32(0)) + jnp.sum(x, dtype=jnp.float32)
    return found


def called(
    one: Callable[..., tuple[Any, PyTree]],
    x: Any,
    keys: jax.Array | None,
    axes: Axes,
    *,
    train: bool,
    draws: bool,
) -> tuple[Any, PyTree]:
    """`one(x, keys, batch_axes, None)`; or if it `draws`, that of each example, with its own key.

    Whatever is drawn for an example is then the same on any number of devices. `keys` (B,) None:
    evaluation, where an example's key is made of its own values. Arrays of another first dim than
    the batch are given in full. Numbers that an example's call returns without a batch dim are
    (B,).

    Returns:
        The outputs (B, ...), and the new state.

    Raises:
        UsageError: The new state differs between examples.
    """
    if not draws:
        return one(x, keys, axes, None)
    arrays, with_arrays = split_arrays(x)
    if keys is None:
        keys = keys_by_value(arrays)
    in_axes = [0 if jnp.shape(x)[:1] == keys.shape else None for x in arrays]

    def of_example(arrays: Sequence[Any], key: jax.Array) -> tuple[Any, PyTree]:
        pairs = zip(arrays, in_axes, strict=True)
        x = with_arrays([x if dim is None else x[None] for x, dim in pairs])
        with of_one_example():
            y, state = one(x, key[None] if train else None, (_EXAMPLE, *axes), key)
        sown = {kind: state.pop(kind) for kind in SOWN if kind in state}
        without_dim = jax.tree.map(lambda y: y[0] if jnp.shape(y)[:1] == (1,) else y, y)
        return (without_dim, sown), state

    try:
        run = jax.vmap(of_example, (in_axes, 0), (0, None), axis_name=_EXAMPLE)
        (y, sown), state = run(arrays, keys)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise UsageError(
            "the model's state would differ between examples, each of which is called by itself "
            f"(rngs). Keep statistics of the batch with nn.BatchNorm, or leave rngs out. {GUIDE}"
        ) from error
    return y, {**state, **sown}


def keys_by_value(arrays: Sequence[jax.Array]) -> jax.Array:
    """One key an example, (B,), made of the bits of its values: the same wherever it is."""
    rows = arrays[0].shape[0]
    total = jnp.zeros((rows,), jnp.uint32)
    for x in arrays:
        wide = x if x.dtype.itemsize <= 4 else x.astype(jnp.float32)
        if jnp.issubdtype(wide.dtype, jnp.inexact):
            bits = jax.lax.bitcast_convert_type(wide.astype(jnp.float32), jnp.uint32)
        else:
            bits = wide.astype(jnp.uint32)
        flat = bits.reshape(rows, -1)
        # Odd factors, different at each place: sums modulo 2 ** 32 are exact in any order.
        factors = (jnp.arange(flat.shape[1], dtype=jnp.uint32) * jnp.uint32(2654435761)) | 1
        total = total * jnp.uint32(2246822519) + jnp.sum(flat * factors[None], 1, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(seed_key(0), total)


def named_keys(streams: Streams, key: jax.Array, *, train: bool = False) -> dict[str, jax.Array]:
    """The keys of an example for these streams, and for dropout while the module trains."""
    names = [streams] if isinstance(streams, str) else list(streams)
    names += ["dropout"] if train and "dropout" not in names else []
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}
