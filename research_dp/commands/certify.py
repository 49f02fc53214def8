"""Certifies the strategy of a configuration, or of a gin file alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, NoReturn

import jax.numpy as jnp

from research_dp.argument_types import is_floating_dtype
from research_dp.certification import certify, harness, quick
from research_dp.certification.certificate import Certificate
from research_dp.commands import runtime
from research_dp.commands.flags import Command, check_writable, flag, switch, whole_number
from research_dp.config import gin_internals, load, parser
from research_dp.console import Progress, Report, put
from research_dp.distributed.mesh import refuse_several_processes
from research_dp.errors import binding_error
from research_dp.models import mlp
from research_dp.strategies import StrategyConfig
from research_dp.training.loop import configured
from research_dp.types import TrainableModel

QUICK_APIS = ("linen", "nnx")


@dataclasses.dataclass
class Certify(Command):
    """The command `certify`; `against` is a shipped strategy's stem, or binds `train.strategy`."""

    against: str = flag("the oracle: a strategy, or its gin file", "S", default="single")
    steps: int = flag("steps that are compared", "N", default=30, type=whole_number)
    json_file: str | None = flag("writes all that was found there", "FILE", "--json")
    quick: bool = switch("a strategy's file alone, on a small built-in run")
    verbose: bool = switch("print all checks, steps and the arrays nearest to their bounds")
    verb: ClassVar[str] = "certify"

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        super().check(refuse)
        if self.quick and (self.against, self.steps) != (Certify.against, Certify.steps):
            refuse("--quick has its own oracle and steps: leave out --against and --steps")

    def run(self) -> int:
        certificate = self.result()
        put(*certificate.parts(verbose=self.verbose))
        return 0 if certificate.certified else 1

    def result(self) -> Certificate:
        """Certifies, and writes the JSON file if there is to be one."""
        with Progress("Reading the configuration") as report:
            return self._result(report)

    def _result(self, report: Report) -> Certificate:
        if self.quick:
            self.bindings = ["shard_params.min_weight_size = 64", *self.bindings]
        config = self.load(complete=not self.quick)
        check_writable("--json", self.json_file)
        if not self.quick:
            runtime.set_up_processes()
        runtime.set_up_devices(self.cpu_devices)
        runtime.set_up_compilation_cache()
        if not self.quick:
            refuse_several_processes("certify", "Give --cpu_devices.", binding="")
        strategy = _bound_strategy()
        if self.quick:
            models = {api: quick_model(api) for api in QUICK_APIS}
            result = quick.certify_quick(strategy, models, report)
        else:
            result = self._certify_run(config, report)
        if self.json_file:
            Path(self.json_file).write_text(json.dumps(result.as_json(), indent=1))
        return result

    def _certify_run(self, config: load.Config, report: Report) -> Certificate:
        strategy, spec, data = configured()
        with gin_internals.kept():
            is_file = self.against.endswith(".gin")
            load.load([self.against if is_file else f"strategies/{self.against}.gin"])
            oracle = gin_internals.value_of("train.strategy")
        gathered = [b.value for b in config.used if b.parameter == "gather_dtype"]
        bench = harness.Bench(
            config=strategy,
            against=oracle.resolve(spec),
            spec=spec,
            precision=precision_of(config.used),
            gather_dtype=gathered[-1] if gathered else None,
        )
        dtypes = sorted({b.value for b in config.used if _names_dtype(b)})
        return certify.certify(bench, data, steps=self.steps, dtypes=dtypes, report=report)


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
