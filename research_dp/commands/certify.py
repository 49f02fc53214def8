"""Certifies the strategy of a configuration, or of a gin file alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import ClassVar, NoReturn

from research_dp.certification import certify, harness, quick
from research_dp.certification.certificate import Certificate
from research_dp.certification.tolerances import names_dtype, precision_of
from research_dp.commands import jax_setup
from research_dp.commands.flags import (
    Command,
    check_writable,
    flag,
    switch,
    whole_number,
    write_file,
)
from research_dp.config import gin_internals, load
from research_dp.console import Progress, Report, put
from research_dp.distributed.mesh import refuse_several_processes
from research_dp.errors import UsageError, binding_error
from research_dp.models import mlp
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.training.train import configured
from research_dp.types import DataSet, TrainableModel

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
        return 0 if certificate.is_right else 1

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
            jax_setup.set_up_processes()
        jax_setup.set_up_devices(self.cpu_devices)
        jax_setup.set_up_compilation_cache()
        if not self.quick:
            refuse_several_processes("certify", "Give --cpu_devices.", binding="")
        strategy = _bound_strategy()
        if self.quick:
            models = {api: quick_model(api) for api in QUICK_APIS}
            result = quick.certify_quick(strategy, models, report)
        else:
            bench, data = bench_of(config, self.against)
            dtypes = sorted({b.value for b in config.used if names_dtype(b.name, b.value)})
            result = certify.certify(bench, data, steps=self.steps, dtypes=dtypes, report=report)
        if self.json_file:
            write_file("--json", self.json_file, json.dumps(result.as_json(), indent=1))
        return result


def bench_of(config: load.Config, against: str) -> tuple[harness.Bench, DataSet]:
    """The bench of the run that is loaded, against a shipped strategy or a file; and its data."""
    strategy, spec, data = configured()
    oracle = _oracle(against, spec)
    gathered = [b.value for b in config.used if b.parameter == "gather_dtype"]
    bench = harness.Bench(
        config=strategy,
        against=oracle,
        spec=spec,
        precision=precision_of((b.name, b.value) for b in config.used),
        gather_dtype=gathered[-1] if gathered else None,
    )
    return bench, data


def _oracle(against: str, spec: TrainSpec) -> StrategyConfig:
    """The strategy of --against for a run; a mistake is blamed on its file, not on the run's."""
    file, loaded = against if against.endswith(".gin") else f"strategies/{against}.gin", None
    try:
        with gin_internals.kept():
            loaded = load.load([file])
            return _bound_strategy().resolve(spec)
    except UsageError as error:
        text = str(load.as_mistake(error, loaded)).replace("error: ", "")
        text = text.removeprefix(f"--gin_file={file}: ")
        raise UsageError(f"--against={against}: {text}") from error


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
