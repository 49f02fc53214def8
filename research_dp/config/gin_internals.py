"""Accesses gin's registry and state, which have no public names, for all other modules.

`tests/config/test_gin_internals.py` fails when another version of gin differs here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gin

from research_dp.errors import UsageError

# What the caller passes, where gin names a function of this package and does not call it (`@f`):
# the arguments of slots, rules, engines, readers, preprocessing and masks. They come first.
_CALLER_PASSES = {
    *("params", "axis_name", "grads", "axis_names", "gradients", "parameters", "optimizer"),
    *("path", "shape", "axis_size", "config", "spec"),
    *("folder", "builder", "train_split", "eval_split", "preprocess", "features"),
}
_MUTABLE = ("_CONFIG", "_OPERATIVE_CONFIG", "_SINGLETONS")


@dataclasses.dataclass(frozen=True)
class Configurable:
    """A function that gin can configure."""

    selector: str  # its full name, e.g. 'strategies.mapped'
    function: Callable[..., Any]  # without gin
    denied: frozenset[str]  # parameters that gin cannot bind

    @property
    def name(self) -> str:
        """The shortest name that a file would use: 'mapped', 'optax.adamw'."""
        module, _, last = self.selector.rpartition(".")
        return f"optax.{last}" if module == "optax" else last

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that gin can bind, by name."""
        parameters = inspect.signature(self.function).parameters
        return {name: p for name, p in parameters.items() if name not in self.denied}

    @property
    def passed(self) -> set[str]:
        """Those of them that its caller passes, so that a binding would have no effect."""
        if not inspect.unwrap(self.function).__module__.startswith("research_dp."):
            return set()
        needed = (name if p.default is p.empty else "" for name, p in self.parameters.items())
        return set(itertools.takewhile(_CALLER_PASSES.__contains__, needed))


def configurables() -> dict[str, Configurable]:
    """All registered functions but gin's own, by full name."""
    return {
        name: Configurable(name, entry.wrapped, frozenset(entry.denylist or ()))
        for name, entry in gin.config._REGISTRY.items()
        if not name.startswith("gin.")
    }


def matching(selector: str) -> list[str]:
    """The full names that a selector can mean, gin's own functions included."""
    return list(gin.config._REGISTRY.matching_selectors(selector))


def find(selector: str) -> Configurable | None:
    """The function that a selector means; None if gin knows none, or it is gin's own."""
    names = matching(selector)
    return configurables().get(names[0]) if names else None


def name_in_dumps(selector: str) -> str:
    """The name of a function in gin's own dumps, e.g. `config.gin`: the shortest that is unique."""
    return gin.config._REGISTRY.minimal_selector(selector)


def constants() -> list[str]:
    """Names that `%NAME` finds without a binding."""
    return [name for name, _ in gin.config._CONSTANTS.items()]


def value_of(name: str) -> Any:
    """The value that a parameter is bound to; `@f()` is called. UsageError: it is bound nowhere."""
    try:
        value = gin.query_parameter(name)
    except ValueError as error:
        raise UsageError(f"{name} is bound nowhere. Add the gin file that binds it.") from error
    if isinstance(value, gin.config.ConfigurableReference):
        function = value.scoped_configurable_fn
        return function() if value.evaluate else function
    return value


def frozen(name: str) -> Any:
    """The value of a parameter, as `value_of`, which does not change with gin's bindings.

    Functions are plain ones: what they are bound to now is given to them as arguments.
    """
    return _frozen(gin.query_parameter(name))


def _frozen(value: Any) -> Any:
    if isinstance(value, gin.config.ConfigurableReference):
        configurable = value.configurable
        if configurable.selector.startswith("gin."):  # a macro or a constant
            return _frozen(value.scoped_configurable_fn())
        with gin.config_scope(value.scopes):
            bound = gin.get_bindings(configurable.selector, resolve_references=False)
            arguments = {name: _frozen(x) for name, x in bound.items()}
        function = configurable.wrapped
        if value.evaluate:
            return function(**arguments)
        return functools.partial(function, **arguments) if arguments else function
    if isinstance(value, dict):
        return {_frozen(key): _frozen(x) for key, x in value.items()}
    return type(value)(map(_frozen, value)) if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restores, at the end, all bindings that there were at the beginning."""
    config = gin.config
    before = {name: dict(getattr(config, name)) for name in _MUTABLE}
    before["_CONFIG"] = {key: dict(values) for key, values in before["_CONFIG"].items()}
    imports, locked = set(config._IMPORTS), gin.config_is_locked()
    try:
        yield
    finally:
        gin.clear_config()
        for name, values in before.items():
            getattr(config, name).update(values)
        config._IMPORTS.update(imports)
        config._set_config_is_locked(locked)
