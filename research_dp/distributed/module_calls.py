"""How a module's `__call__` is called: its inputs by position, its mode by name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax.errors import InvalidRngError, ModifyScopeVariableError

from research_dp.errors import UsageError

# Arguments that say whether a module trains -> their value while it does.
MODES = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
GUIDE = "See docs/own_model.md."


def mode_options(names: Sequence[str], train: bool) -> dict[str, bool]:
    """The values of these arguments, in training or in evaluation."""
    return {name: MODES[name] == train for name in names}


def modes_of(call: Callable[..., Any], name: str, inputs: Sequence[str]) -> list[str]:
    """The arguments of `call` that say whether the module called `name` trains.

    Raises:
        UsageError: `call` does not take the inputs by position and these arguments by name.
    """
    signature = inspect.signature(call)
    modes = [mode for mode in MODES if mode in signature.parameters]
    try:
        signature.bind(*inputs, **dict.fromkeys(modes, True))
    except TypeError as error:
        given = ", ".join([*inputs, *(f"{mode}=..." for mode in modes)])
        raise UsageError(
            f"{name}.__call__{signature} cannot be called with ({given}): {error}. Name its arrays "
            f"by inputs=(...), in its order. Give other arguments a default. {GUIDE}"
        ) from error
    return modes


def check_contract(call: Callable[..., Any], name: str, function: str) -> None:
    """Raises UsageError if `call` does not take (x, *, train, keys, batch_axes)."""
    signature = inspect.signature(call)
    try:
        signature.bind(None, train=True, keys=None, batch_axes=())
    except TypeError as error:
        plain = function.replace("_functions", "")
        raise UsageError(
            f"{name}.__call__{signature} must take (x, *, train, keys, batch_axes) for {function}: "
            f"{error}. Use research_dp.from_{plain}, which takes any module. {GUIDE}"
        ) from error


@contextlib.contextmanager
def clear_errors(name: str, *, train: bool) -> Iterator[None]:
    """Says what to change where a call of the module called `name` raises errors of Flax or JAX."""
    try:
        yield
    except InvalidRngError as error:
        when = "in training" if train else "in evaluation"
        advice = "Only nn.Dropout may draw, from its stream 'dropout'."
        if not train:
            advice = "Give its dropout layers deterministic=True there, by an argument `train`."
        raise UsageError(
            f"{name} draws from an RNG stream of Flax {when}: "
            f"{str(error).partition(' (')[0].rstrip('.')}. {advice} {GUIDE}"
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
