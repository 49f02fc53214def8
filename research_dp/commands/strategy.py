"""A strategy by the name of its gin file, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from research_dp.argument_checks import checked
from research_dp.commands import jax_setup, plan_candidates
from research_dp.commands.configured import Bindings, as_gin, session
from research_dp.config import binding_checks, gin_internals, load
from research_dp.config.reachability import ROOT
from research_dp.errors import UsageError
from research_dp.strategies import StrategyConfig


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
    with session((), bindings, imports=imports) as run:
        jax_setup.set_up_devices(None)
        candidate, *others = plan_candidates.of([name], f"strategy({name!r})")
        if others:
            raise UsageError(f"strategy({name!r}): give the name of one strategy.")
        config = run.load(candidate.files, complete=False)
        parameters = list(_parameters(config))
        named = {_full_name(option, parameters, name): x for option, x in options.items()}
        run.bindings = [
            *run.bindings,
            *(f"{parameter} = {as_gin(x)}" for parameter, x in named.items()),
        ]
        run.load(candidate.files, complete=False)
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
