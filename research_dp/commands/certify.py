"""What `certify` compares, from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import gin
import jax.numpy as jnp

from research_dp.argument_types import Floating
from research_dp.certification.harness import Bench, check_one_process
from research_dp.config import gin_internals, load
from research_dp.config.load import Config
from research_dp.config.parser import Binding
from research_dp.errors import check_kind
from research_dp.strategies import StrategyConfig
from research_dp.training.loop import spec_of, train
from research_dp.types import DataSet


def bench_of(config: Config, against: str) -> tuple[Bench, DataSet, tuple[str, ...]]:
    """What is compared, the data, and the floating-point dtypes that the configuration names.

    Args:
        config: Loaded.
        against: Stem of a shipped strategy, or a gin file that binds `train.strategy`.

    Raises:
        UsageError: Something in the configuration is wrong.
    """
    check_one_process()
    known = inspect.signature(spec_of).parameters
    signature = inspect.signature(inspect.unwrap(train)).parameters
    values = {name: signature[name].default for name in known}
    values |= {k: x for k, x in gin.get_bindings("train").items() if k in known}
    recipe = gin_internals.value_of("train.strategy")
    check_kind("train.strategy", recipe, StrategyConfig, "@data_parallel()")
    with gin_internals.kept():
        file = against if against.endswith(".gin") else f"strategies/{against}.gin"
        load.load([file])
        oracle = gin_internals.value_of("train.strategy")
    dtypes = named_dtypes(config)
    gathered = [b.value for b in config.used if b.parameter == "gather_dtype"]
    spec = spec_of(**values)
    bench = Bench(
        config=recipe.resolve(spec),
        against=oracle.resolve(spec),
        spec=spec,
        precision=precision_of(config.used),
        gather_dtype=gathered[-1] if gathered else None,
    )
    return bench, values["data"], dtypes


def named_dtypes(config: Config) -> tuple[str, ...]:
    """The floating-point dtypes that bindings name, of parameters called `dtype` or `*_dtype`."""
    return tuple(sorted({b.value for b in config.used if _names_dtype(b)}))


def precision_of(used: Iterable[Binding]) -> float:
    """Of the coarsest dtype in which gradients may be before they are summed over devices.

    That of compute counts as those on the wire do: each device rounds the gradient of its own
    examples to it, the oracle that of all. What the optimizer keeps its state in does not.
    """
    named = (b.value for b in used if _names_dtype(b) and not b.selector.startswith("optax."))
    return max(float(jnp.finfo(x).eps) for x in ("float32", *named))


def _names_dtype(b: Binding) -> bool:
    named = b.parameter.endswith("dtype") and isinstance(b.value, str)
    return named and Floating().accepts(b.value)
