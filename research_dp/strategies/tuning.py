"""What serves a kind of device: options that each strategy takes as far as they concern it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import gin

from research_dp.argument_checks import checked

if TYPE_CHECKING:
    from research_dp.strategies.strategy import StrategyConfig


@gin.register("tuning", module="strategies")
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What serves a kind of device; what `data_parallel` binds itself comes first.

    Attributes:
        prefetch: `data_parallel.prefetch` of strategies that gather each unit where it is used, if
            the model allows it.
        compiler_options: XLA's options for every training step.
        gather_options: Further ones for strategies that gather each unit where it is used, with
            this `prefetch`.
    """

    gin_name: ClassVar[str] = "tuning"

    prefetch: bool | None = None
    compiler_options: Mapping[str, Any] | None = None
    gather_options: Mapping[str, Any] | None = None

    def without_gathers(self) -> Tuning:
        """It for a model that allows no such `prefetch`."""
        return dataclasses.replace(self, prefetch=None, gather_options=None)


tuning = Tuning


def tuned(config: StrategyConfig, *, gathers_units: bool) -> StrategyConfig:
    """A strategy with what its `tuning` has for it; `gathers_units`: each where it is used."""
    found = config.tuning
    if found is None:
        return config
    prefetch = found.prefetch if gathers_units and config.prefetch is None else config.prefetch
    of_gathers = found.gather_options if gathers_units and prefetch == found.prefetch else {}
    given = (found.compiler_options, of_gathers, config.compiler_options)
    options = {name: value for some in given for name, value in (some or {}).items()}
    return dataclasses.replace(config, prefetch=prefetch, compiler_options=options or None)
