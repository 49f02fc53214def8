"""How a module's `__call__` is called: its inputs by position, its mode by name."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax.errors import InvalidRngError, ModifyScopeVariableError

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
