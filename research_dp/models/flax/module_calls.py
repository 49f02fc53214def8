"""What modules of Linen and NNX share: how they are called, BatchNorm, dropout.

Inputs are given by position, the mode by name. Flax draws a dropout mask of a batch from one key:
its values for an example would depend on the devices that share the batch. Here each example has
its own key. Flax's key only says which layer draws, at which call and in which turn of a loop: it
can be split, but nothing can be drawn from it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError, ModifyScopeVariableError
from jax.extend import random

from research_dp.distributed.collectives import Axes
from research_dp.errors import UsageError

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
Names = str | Sequence[str]  # of one input, or of several, which are given as a tuple


def mode_options(names: Sequence[str], train: bool) -> dict[str, bool]:
    """The values of these arguments, in training or in evaluation."""
    return {name: MODES[name] == train for name in names}


class ModuleCall:
    """How a module called `name` is called with the input of this name, or with several.

    `modes` are its arguments that say whether it trains. It is given `keys` and `batch_axes`, as in
    `linen_functions`, if it names them. `inputs` None: one input, for `linen_functions` itself;
    then a module with `**options` gets them, and `train`, too.

    Raises:
        UsageError: It does not take the inputs by position, or another of its arguments may be a
            mode, which would keep its default.
    """

    def __init__(self, call: Callable[..., Any], name: str, inputs: Names | None):
        self.name, self._signature = name, inspect.signature(call)
        names = ["x"] if inputs is None else [inputs] if isinstance(inputs, str) else inputs
        self._is_one = inputs is None or isinstance(inputs, str)
        parameters = self._signature.parameters
        takes_any = inspect.Parameter.VAR_KEYWORD in {p.kind for p in parameters.values()}
        gets_all = inputs is None and takes_any
        self.modes = [mode for mode in MODES if mode in parameters] or ["train"] * gets_all
        self._others = [x for x in ("keys", "batch_axes") if x in parameters or gets_all]
        try:
            bound = self.arguments(None if self._is_one else names, train=True)
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
        for other, parameter in parameters.items():
            # With a mode that is known, a flag such as `decode` may keep its default.
            is_unknown = not self.modes and isinstance(parameter.default, bool)
            is_mode = is_unknown or other in _OTHER_MODES
            if is_mode and other not in bound.arguments:
                raise UsageError(
                    f"{name}.__call__{self._signature} would always be called with {other} = "
                    f"{parameter.default!r}. If it says whether the module trains, name it one of "
                    f"{', '.join(MODES)}. If not, make it a field of the module. {GUIDE}"
                )

    def arguments(
        self, x: Any, *, train: bool, keys: Any = None, batch_axes: Any = ()
    ) -> inspect.BoundArguments:
        """Its arguments, by position where they can be: `remat` needs that of static ones."""
        others = {"keys": keys, "batch_axes": batch_axes}
        options = {name: others[name] for name in self._others}
        args = (x,) if self._is_one else x
        return self._signature.bind(*args, **mode_options(self.modes, train), **options)


@contextlib.contextmanager
def clear_errors(name: str, *, train: bool) -> Iterator[None]:
    """Says what to change where a call of the module called `name` raises errors of Flax or JAX."""
    try:
        yield
    except InvalidRngError as error:
        stream = re.search(r'PRNG for "(.*?)"', str(error))
        advice = "Only nn.Dropout may draw, from its stream 'dropout'."
        if not train:
            advice = "Give its dropout layers deterministic=True there, by an argument `train`."
        raise UsageError(
            f"{name} draws from the RNG stream {stream[1] if stream else 'params'!r} of Flax in "
            f"{'training' if train else 'evaluation'}. {advice} {GUIDE}"
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
            f"{name} communicates along axis {axis!r}, which no mesh here has. Leave axis_name "
            f"out: BatchNorm takes statistics of all devices. {GUIDE}"
        ) from error


def check_batch_norm(axis_name: Any, axes: Axes, mask: Any) -> None:
    """Raises UsageError for a BatchNorm whose statistics cannot be those of all devices.

    `axes` are the mesh axes that the batch is split over, which it may name itself.
    """
    if axis_name not in (None, axes):
        raise UsageError(
            f"BatchNorm has axis_name = {axis_name!r}. Leave it out: statistics are taken over the "
            f"global micro-batch under every strategy. {GUIDE}"
        )
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
        "the model draws random numbers from an RNG stream of Flax other than by a dropout layer, "
        "e.g. in an attention_fn of its own or as noise. They would depend on the device. Use "
        "nn.Dropout or nnx.Dropout, or Flax's attention with its default attention_fn, or let the "
        f"model take `keys`, one key per example. {GUIDE}"
    )
