"""What `certify` compares, from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import gin
import jax.numpy as jnp

from research_dp.argument_types import is_floating_dtype
from research_dp.certification import quick
from research_dp.certification.certificate import Certificate
from research_dp.certification.certify import certify
from research_dp.certification.harness import Bench
from research_dp.config import gin_internals, load, parser
from research_dp.distributed.mesh import refuse_several_processes
from research_dp.errors import binding_error
from research_dp.models import mlp
from research_dp.strategies import StrategyConfig
from research_dp.training.loop import spec_of, train
from research_dp.types import TrainableModel

QUICK_APIS = ("linen", "nnx")


def certify_run(config: load.Config, against: str, steps: int) -> Certificate:
    """Certifies the strategy of a loaded configuration over some steps.

    `against` is the stem of a shipped strategy, or a gin file that binds `train.strategy`.
    """
    refuse_several_processes("certify", "Give --cpu_devices.", binding="")
    signature = inspect.signature(inspect.unwrap(train)).parameters
    values = {name: parameter.default for name, parameter in signature.items()}
    values |= gin.get_bindings("train")
    strategy = _bound_strategy()
    with gin_internals.kept():
        file = against if against.endswith(".gin") else f"strategies/{against}.gin"
        load.load([file])
        oracle = gin_internals.value_of("train.strategy")
    gathered = [b.value for b in config.used if b.parameter == "gather_dtype"]
    spec = spec_of(values)
    bench = Bench(
        config=strategy.resolve(spec),
        against=oracle.resolve(spec),
        spec=spec,
        precision=precision_of(config.used),
        gather_dtype=gathered[-1] if gathered else None,
    )
    dtypes = sorted({b.value for b in config.used if _names_dtype(b)})
    return certify(bench, values["data"], steps=steps, dtypes=dtypes)


def certify_quick() -> Certificate:
    """Certifies the strategy that is bound, on the small built-in run."""
    return quick.certify_quick(_bound_strategy(), {api: quick_model(api) for api in QUICK_APIS})


def quick_model(api: str) -> TrainableModel:
    """A small perceptron with dropout."""
    return mlp(api=api, widths=(32, 16), num_classes=quick.NUM_CLASSES, dropout_rate=0.3)


def _bound_strategy() -> StrategyConfig:
    strategy = gin_internals.value_of("train.strategy")
    if isinstance(strategy, StrategyConfig):
        return strategy
    name = getattr(strategy, "__name__", None) if callable(strategy) else None
    itself = f" = @{name} is the function itself; @{name}() is what it returns."
    problem = itself if name else f" = {strategy!r}: give e.g. @data_parallel()."
    raise binding_error("train.strategy", problem)


def precision_of(used: Iterable[parser.Binding]) -> float:
    """Machine epsilon of the coarsest dtype that gradients may have before they are summed.

    The dtype of compute counts as those on the wire do: each device rounds the gradient of its own
    examples to it, the oracle that of all. The dtype of the optimizer's state does not count.
    """
    names = (b.value for b in used if _names_dtype(b) and not b.selector.startswith("optax."))
    return max(float(jnp.finfo(x).eps) for x in ("float32", *names))


def _names_dtype(b: parser.Binding) -> bool:
    """Whether a binding gives a floating-point dtype to `dtype` or to `*_dtype`."""
    is_named = b.parameter.lower().endswith("dtype") and isinstance(b.value, str)
    return is_named and is_floating_dtype(b.value)
