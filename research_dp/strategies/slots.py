"""What a strategy's four functions are given and return.

Each has the contract of its seed: a function that somebody wrote for xlstm-jax's `shard_params`,
`gather_params` or `sync_gradients`, or for MLX's optimizers, fills the slot unchanged. What else
a strategy decides comes by keyword, to functions that declare it by `collectives.takes`:

    reduction: The strategy's collectives (`Reduction`); `gather`, `sync`, `update`.
    shardings: `LeafSharding`s of gradients and optimizer state; `sync`, `update`.
    averaged: Whether `sync` has averaged the gradients; `update`, which does it otherwise.
    rows: Rows of tables that are sharded by feature, which alone are wanted; `gather`.
    units, on_decision: See `shard_params`; `shard`.

`sync` and `update` may carry state, as Optax transforms do: see `Stateful`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import flax.linen as nn
import jax

from research_dp.distributed.boxed import unboxed
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.errors import UsageError

if TYPE_CHECKING:
    from research_dp.strategies.strategy import StrategyConfig

PyTree = Any


class Shard(Protocol):
    """Decides which parameters are sharded; e.g. `shard_params`.

    It is traced inside mapped axes, and never run: the engine takes the dims from the boxes. Of a
    stack of layers it is given one layer.
    """

    def __call__(self, params: PyTree, axis_name: str) -> PyTree:
        """Replicated parameters -> local shards, in `nn.Partitioned`s that name the axis."""


class Gather(Protocol):
    """All-gathers parameters for compute; e.g. `gather_params`."""

    def __call__(self, params: PyTree, axis_name: str) -> PyTree:
        """Boxed local shards -> unsharded parameters, whose gradients come back as boxed shards.

        A gradient is this device's shard of the mean over the axis.
        """


class Sync(Protocol):
    """Averages gradients over devices; e.g. `sync_gradients`, `scatter_gradients`."""

    def __call__(self, grads: PyTree, axis_names: tuple[str, ...]) -> PyTree:
        """Local gradients, boxed where sharded -> averages, of the shapes that `update` takes."""


class Update(Protocol):
    """Applies the optimizer; e.g. `apply_gradients`, `fsdp_apply_gradients`."""

    def __call__(self, gradients: PyTree, parameters: PyTree, optimizer: Any) -> PyTree:
        """(gradients, parameters, object with `apply_gradients`) -> new parameters."""


@runtime_checkable
class Stateful(Protocol):
    """A slot with state: an object with these two methods in place of a function.

    Attributes:
        differs_over: The mesh axes over which the state differs from device to device; () if it is
            the same on all. The state is then a global array with a leading dim for those axes.
    """

    differs_over: tuple[str, ...]

    def init(self, params: PyTree) -> PyTree:
        """Unsharded parameters -> the state of one device before the first step."""

    def apply(self, *args: Any, state: PyTree, **options: Any) -> tuple[PyTree, PyTree]:
        """The slot's arguments and this device's state -> (what the slot returns, new state)."""

    def resize(self, state: PyTree, devices: int) -> PyTree:
        """Global state, with its leading dim -> the same for another number of devices.

        Raises:
            UsageError: It cannot be continued on another number of devices.
        """


def options_of(slot: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a strategy's options that a slot's function declares to take."""
    function = slot.apply if isinstance(slot, Stateful) else slot
    taken: frozenset[str] = getattr(function, "takes", frozenset())
    while not taken and hasattr(function, "func"):  # functools.partial
        function = function.func
        taken = getattr(function, "takes", frozenset())
    return {name: value for name, value in offered.items() if name in taken}


def call_in(
    states: PyTree, name: str, slot: Callable[..., PyTree] | Stateful, *args: Any, **offered: Any
) -> tuple[PyTree, PyTree]:
    """Calls a slot's function or object.

    Args:
        states: States of the slots that have any, by name, as this device has them: with a leading
            dim of length 1 if they differ from device to device.
        name: The slot.
        slot: Its function, or its object.
        *args: The arguments of the slot's contract.
        **offered: The strategy's options; those that it declares are passed.

    Returns:
        (what the slot returns, the new states).
    """
    options = options_of(slot, offered)
    if not isinstance(slot, Stateful):
        return unboxed(slot(*args, **options)), states
    differs = bool(slot.differs_over)
    state = jax.tree.map(lambda x: x[0], states[name]) if differs else states[name]
    result, state = slot.apply(*args, state=state, **options)
    state = jax.tree.map(lambda x: x[None], state) if differs else state
    return unboxed(result), {**states, name: state}


def in_boxes(tree: PyTree, shardings: PyTree) -> PyTree:
    """Arrays that are sharded over `fsdp` in boxes that name it at their dim."""

    def one(x: jax.Array, sharding: Any) -> Any:
        if sharding.dim is None:
            return x
        names: list[str | None] = [None] * x.ndim
        names[sharding.dim] = FSDP_AXIS
        return nn.Partitioned(x, tuple(names))

    return jax.tree.map(one, tree, shardings)


def refuse_no_sync(config: StrategyConfig) -> None:
    """Raises UsageError if several devices would each follow gradients of their own."""
    if config.sync is None and config.mesh.size > 1 and not _averages(config.update):
        raise UsageError(
            f"data_parallel.sync = None on {config.mesh.size} devices: nothing averages their "
            "gradients. Bind @sync_gradients, which leaves alone what `gather` averaged.",
            binding="data_parallel.sync",
        )


def _averages(update: Any) -> bool:
    """Whether `update` averages gradients that `sync` has not averaged."""
    return update is not None and bool(options_of(update, {"averaged": False}))


def refuse_idle(config: StrategyConfig, *, gathers: bool, syncs: bool) -> None:
    """Raises UsageError if it is bound when something happens that never does."""
    for name, value, default, happens in (
        ("reshard_after_forward", config.reshard_after_forward, True, gathers),
        ("sync_each", config.sync_each, "step", syncs),
    ):
        if value != default and not happens:
            slot = "sync" if name == "sync_each" else "gather"
            raise UsageError(
                f"data_parallel.{name} = {value!r} has no effect: this strategy calls no {slot}. "
                f"Leave it at {default!r}.",
                binding=f"data_parallel.{name}",
            )


def refuse_filled(config: StrategyConfig, names: tuple[str, ...], why: str) -> None:
    """Raises UsageError if one of these slots or options is not None."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            raise UsageError(
                f"data_parallel.{name} = {getattr(value, '__name__', value)}: {why}",
                binding=f"data_parallel.{name}",
            )


def refuse_state(config: StrategyConfig, why: str) -> None:
    """Raises UsageError if a slot carries state."""
    for name in ("sync", "update"):
        slot = getattr(config, name)
        if isinstance(slot, Stateful):
            raise UsageError(
                f"data_parallel.{name} = {type(slot).__name__}: {why}",
                binding=f"data_parallel.{name}",
            )
