"""`plan`, `certify`, `dry_run` and `strategy` for Python callers; gin's own bindings stay."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.certification.certificate import Certificate
from research_dp.commands import certify as certify_command
from research_dp.commands import dry_run as dry_run_command
from research_dp.commands import jax_setup, plan_candidates, python_calls
from research_dp.commands import plan as plan_command
from research_dp.commands.flags import Command
from research_dp.commands.python_calls import Bindings, Files
from research_dp.config import binding_checks, gin_internals, load
from research_dp.config.reachability import ROOT
from research_dp.distributed.placement import nbytes
from research_dp.errors import UsageError
from research_dp.strategies import Strategy, StrategyConfig, jaxpr_collectives
from research_dp.training.train import train


@checked
def strategy(
    name: str, bindings: Bindings = (), *, imports: Sequence[str] = (), **options: Any
) -> StrategyConfig:
    """A strategy by the name of its gin file; `.build(TrainSpec(...))` makes its functions.

    Example: `research_dp.strategy("fsdp", min_weight_size=1024)`.

    Args:
        name: A shipped strategy, e.g. 'fsdp', or the path of a gin file that binds
            `train.strategy`. 'fsdp+bf16_collectives' adds the shipped file of that name.
        bindings: Parameter -> value, e.g. {'shard_params.min_weight_size': 1024}; see `run`.
        imports: Modules of yours that register functions with gin.
        options: Values of parameters by their last name alone, where it is unique among those of
            the strategy's functions: `min_weight_size`, `axes`, `gather_dtype`, `overlap`.

    Raises:
        UsageError: There is no such strategy or parameter, or a value is wrong; the message has
            what there is.
    """
    command = python_calls.command_of(Command, (), bindings, imports=imports)
    with python_calls.session(command):
        jax_setup.set_up_devices(None)
        candidate, *others = plan_candidates.of([name], f"strategy({name!r})")
        if others:
            raise UsageError(f"strategy({name!r}): give the name of one strategy.")
        config = command.load(candidate.files, complete=False)
        parameters = list(_parameters(config))
        named = {_full_name(option, parameters, name): x for option, x in options.items()}
        command.bindings = [
            *command.bindings,
            *(f"{parameter} = {python_calls.as_gin(x)}" for parameter, x in named.items()),
        ]
        command.load(candidate.files, complete=False)
        return gin_internals.frozen("train.strategy")


def _parameters(config: load.Config) -> Iterator[str]:
    """The parameters that can be bound of the functions that a strategy is made of."""
    known = gin_internals.configurables()
    evaluated = {selector for _, selector in config.evaluated}
    for selector in sorted(config.functions - {ROOT}):
        for parameter in known[selector].parameters.values() if selector in known else ():
            # The first arguments of engines and slots are given by the call.
            if selector in evaluated or parameter.default is not parameter.empty:
                yield f"{known[selector].name}.{parameter.name}"


def _full_name(option: str, parameters: Sequence[str], name: str) -> str:
    """The one parameter whose last name this is."""
    found = [parameter for parameter in parameters if parameter.rpartition(".")[2] == option]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"strategy({name!r}): {option} may be {' or '.join(found)}. Give the one that you mean "
            f"in bindings: {{{found[0]!r}: ...}}."
        )
    last_names = {parameter.rpartition(".")[2] for parameter in parameters}
    hint = binding_checks.did_you_mean(option, last_names)
    hint = hint or f" It has {', '.join(sorted(last_names))}."
    raise UsageError(f"strategy({name!r}) has no parameter {option!r}.{hint}")


@checked
def plan(
    gin_files: Files = (),
    bindings: Bindings = (),
    *,
    topology: str,
    strategies: str | Sequence[str] = (),
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
    allow_unused: bool = False,
    advise: bool = False,
    measure: bool = False,
    html_file: str | os.PathLike[str] | None = None,
    dump_hlo: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """What strategies cost on devices that need not be present, as `python -m research_dp.plan`.

    Example: `plan("runs/digits.gin", topology="cpu:8", strategies=["ddp", "fsdp"])`.

    Args:
        gin_files: As in `run`.
        bindings: As in `run`.
        topology: 'h100:8x8', 'v5e-64', 'cpu:8', or 'here'.
        strategies: Shipped strategies, or files, to compare, or 'all'; none: the run's own.
        imports: As in `run`.
        cpu_devices: As in `run`; with topology 'here'.
        allow_unused: As in `run`.
        advise: Whether other options and batches of the fastest are compiled too.
        measure: Whether each step is run too, if the devices are present.
        html_file: Where a page with charts and tables is written.
        dump_hlo: Folder for each compiled program's text.

    Returns:
        What `--json` writes: 'strategies' has a dict for each strategy, with numbers in bytes,
        seconds and FLOPs, and 'advice' has sentences. 'exceeded' has a message for each limit of
        the run's budget (`plan.max_...`) that a strategy exceeds.

    Raises:
        UsageError: The configuration is wrong, or no strategy can be built.
    """
    names = [strategies] if isinstance(strategies, str) else strategies
    command = python_calls.command_of(
        plan_command.Plan,
        gin_files,
        bindings,
        imports=imports,
        cpu_devices=cpu_devices,
        allow_unused=allow_unused,
        topology=topology,
        strategies=",".join(names),
        html_file=html_file and os.fspath(html_file),
        dump_hlo=dump_hlo and os.fspath(dump_hlo),
        advise=advise,
        measure=measure,
    )
    with python_calls.session(command):
        result, exceeded = command.result(lambda *parts: None)
    return {**result, "exceeded": exceeded}


@checked
def certify(
    gin_files: Files = (),
    bindings: Bindings = (),
    *,
    against: str = "single",
    steps: Count = 30,
    quick: bool = False,
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
        imports: As in `run`.
        cpu_devices: As in `run`.
        allow_unused: As in `run`.

    Returns:
        The certificate: `certified`, `first_difference`, `cause`, `checks`, `as_json()`; printed,
        it is the text of the command.

    Raises:
        UsageError: Something in the configuration is wrong.
    """
    own = {"against": against, "steps": steps}
    command = python_calls.command_of(
        certify_command.Certify,
        gin_files,
        bindings,
        imports=imports,
        cpu_devices=cpu_devices,
        allow_unused=allow_unused,
        quick=quick,
        **own,
    )
    if quick and own != {"against": "single", "steps": 30}:
        raise UsageError("certify: quick has its own oracle and steps: leave out against and steps")
    with python_calls.session(command):
        return command.result()


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A run that was built and traced, but not started; printed, it is the command's text.

    Attributes:
        config: Binding -> where it was made: file and line, 'bindings: ...', or 'default'.
        strategy: The strategy, built: `.shardings`, `.abstract_state`, `.mesh`.
        nbytes: Part of the state -> (bytes per device, bytes in all) between steps.
        collectives: The collectives of the traced step, each with `kind`, `axes`, `dtype`, `times`
            and `wire_bytes` per device; empty where the compiler inserts them.
        text: What the command prints.
    """

    config: Mapping[str, str]
    strategy: Strategy
    nbytes: Mapping[str, tuple[int, int]]
    collectives: Sequence[Any]
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text


@checked
def dry_run(
    gin_files: Files = (),
    bindings: Bindings = (),
    *,
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
    allow_unused: bool = False,
) -> DryRun:
    """Builds what gin files say without training it, as `python -m research_dp.train --dry_run`.

    Args:
        gin_files: As in `run`.
        bindings: As in `run`.
        imports: As in `run`.
        cpu_devices: As in `run`.
        allow_unused: As in `run`.

    Raises:
        UsageError: Something in the configuration is wrong.
    """
    command = python_calls.command_of(
        Command, gin_files, bindings, imports=imports, allow_unused=allow_unused
    )
    with python_calls.session(command):
        config = command.load()
        jax_setup.set_up_devices(cpu_devices)
        built: list[Strategy] = []
        train(inspect=lambda strategy, spec: built.append(strategy.build(spec)))
        (strategy,) = built
        with contextlib.redirect_stdout(io.StringIO()) as text:
            dry_run_command.show_built(config, strategy)
        state = strategy.abstract_state
        return DryRun(
            config={
                line: python_calls.in_arguments(place)
                for line, place in dry_run_command.configuration(config)
            },
            strategy=strategy,
            nbytes={x: nbytes(getattr(state, x)) for x in ("params", "model_state", "opt_state")},
            collectives=jaxpr_collectives.of_step(strategy),
            text=text.getvalue(),
        )
