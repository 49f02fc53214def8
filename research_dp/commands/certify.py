"""Certifies the strategy of a configuration, or of a gin file alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.certification import certify as certifier
from research_dp.certification.certificate import Certificate
from research_dp.certification.harness import Batch, Bench
from research_dp.certification.tolerances import names_dtype, precision_of
from research_dp.commands import jax_setup
from research_dp.commands.configured import Bindings, Files, check_outputs, session, write_output
from research_dp.config import gin_internals, load
from research_dp.console import Progress, put
from research_dp.distributed.mesh import refuse_several_processes
from research_dp.errors import UsageError, binding_error
from research_dp.models import mlp
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.training import python_objects
from research_dp.training.initial import InitialParams
from research_dp.training.train import configured
from research_dp.types import DataSet

Run = tuple[StrategyConfig, TrainSpec, DataSet, InitialParams | None]
QUICK_STEPS = 4


@checked
def certify(
    gin_files: Files = (),
    bindings: Bindings = (),
    *,
    against: str = "single",
    steps: Count = 30,
    quick: bool = False,
    model: python_objects.Model | None = None,
    data: python_objects.Data | None = None,
    optimizer: python_objects.Optimizer | None = None,
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
    allow_unused: bool = False,
) -> Certificate:
    """Whether a run's strategy computes what a reference strategy computes; see docs/certify.md.

    Example: `certify(["runs/digits.gin", "models/mlp.gin"], cpu_devices=8).certified`.

    Args:
        gin_files: As in `run`.
        bindings: As in `run`.
        against: The reference: a shipped strategy, or a gin file that binds `train.strategy`.
        steps: Steps that are compared.
        quick: Whether a strategy's gin file alone is certified, on a small built-in run.
        model: As in `run`.
        data: As in `run`.
        optimizer: As in `run`.
        imports: As in `run`.
        cpu_devices: As in `run`.
        allow_unused: As in `run`.

    Returns:
        The certificate: `certified`, `first_difference`, `cause`, `checks`, `as_json()`; printed,
        it is the text of the command.

    Raises:
        UsageError: Something in the configuration is wrong.
    """
    objects = {"model": model, "data": data, "optimizer": optimizer}
    with (
        session(gin_files, bindings, imports=imports, allow_unused=allow_unused, **objects) as run,
        Progress("Reading the configuration") as report,
    ):
        if quick:
            if any(objects.values()):
                raise UsageError("--quick has its own run: leave out model, data and optimizer.")
            if (against, steps) != ("single", 30):
                own = "--quick has its own oracle and steps: leave out --against and --steps"
                raise UsageError(own)
            run.bindings, steps = ["shard_params.min_weight_size = 64", *run.bindings], QUICK_STEPS
        config = run.load(complete=not quick)
        if not quick:
            jax_setup.set_up_processes()
        jax_setup.set_up_devices(cpu_devices)
        jax_setup.set_up_compilation_cache()
        if quick:  # dtypes of a model that does not run widen no bound
            config = config.of_strategy()
        else:
            refuse_several_processes("certify", "Give --cpu_devices.", binding="")
        bench, data = bench_of(config, against, _small_run() if quick else configured())
        dtypes = sorted({b.value for b in config.used if names_dtype(b.name, b.value)})
        return certifier.certify(bench, data, steps=steps, dtypes=dtypes, report=report)


def command(*, json_file: str | None = None, verbose: bool = False, **options: Any) -> int:
    """Certifies, prints the certificate and writes it; the exit status is 1 if it is none.

    Args:
        json_file: Write all that was found there.
        verbose: Print all checks, steps and the arrays nearest to their bounds.
        **options: Those of `certify`.
    """
    check_outputs(json_file=json_file)
    certificate = certify(**options)
    if json_file:
        write_output("json_file", json_file, certificate.as_json())
    put(*certificate.parts(verbose=verbose))
    return 0 if certificate.is_right else 1


def bench_of(config: load.Config, against: str, described: Run) -> tuple[Bench, DataSet]:
    """The bench of a run that is loaded, against a shipped strategy or a file; and its data."""
    strategy, spec, data, initial = described
    oracle = _oracle(against, spec)
    gathered = [b.value for b in config.used if b.parameter == "gather_dtype"]
    bench = Bench(
        config=strategy,
        against=oracle,
        spec=spec,
        precision=precision_of(config.bound()),
        gather_dtype=gathered[-1] if gathered else None,
        initial=initial,
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


def _small_run() -> Run:
    """A small run, with Adam, clipping and accumulation, of a classifier of images (4, 4, 1)."""
    strategy, micro_batches, num_classes = _bound_strategy(), 2, 10

    def batches(rows: int, seeds: Iterable[int]) -> Iterator[Batch]:
        for rng in map(np.random.default_rng, seeds):
            yield {
                "image": rng.normal(size=(rows, 4, 4, 1)).astype(np.float32),
                "label": rng.integers(0, num_classes, rows).astype(np.int32),
                "mask": np.ones(rows, np.float32),
            }

    one = next(batches(1, [0]))
    data = DataSet(
        name="noise",
        example={k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in one.items()},
        info={},
        prepare=lambda: None,
        train=lambda order: batches(order.batch_size, range(1, order.num_steps + 1)),
        evaluate=lambda order: batches(order.batch_size, [0]),
    )
    spec = TrainSpec(
        model=mlp(widths=(32, 16), num_classes=num_classes, dropout_rate=0.3),
        optimizer=optax.adam(1e-2),
        example=data.example,
        batch_size=math.lcm(32, strategy.mesh.size * micro_batches),
        accumulation_steps=micro_batches,
        max_grad_norm=0.5,
        seed=3,
    )
    return strategy.resolve(spec), spec, data, None


def _bound_strategy() -> StrategyConfig:
    strategy = gin_internals.value_of("train.strategy")
    if isinstance(strategy, StrategyConfig):
        return strategy
    name = getattr(strategy, "__name__", None) if callable(strategy) else None
    itself = f" = @{name} is the function itself; @{name}() is what it returns."
    problem = itself if name else f" = {strategy!r}: give e.g. @data_parallel()."
    raise binding_error("train.strategy", problem)
