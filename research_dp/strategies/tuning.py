"""What serves a kind of device: options that each strategy takes as far as they concern it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import gin

from research_dp.argument_checks import checked


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
