"""The reduction of strategies with exact sums: it brings the step that makes them exact."""

from __future__ import annotations

import gin

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.deterministic import sum
from research_dp.deterministic.step import DeterministicStep
from research_dp.distributed.collectives import Reduction
from research_dp.errors import binding_error


@gin.register(module="distributed")
@checked
def tree_reduction(*, logical_shards: Count, loop: bool = False) -> Reduction:
    """Adds in the order of one balanced binary tree: the same bits on any number of devices.

    The `reduction` of a strategy. The devices, times `accumulation_steps`, must divide the
    logical shards; a device runs its own one at a time, and it sends one sum. So gradients are
    communicated once a step under every strategy; each device has full ones until then. A user's
    `gather` must not multiply: its backward pass would, between the fence and the additions.

    Args:
        logical_shards: Their number, a power of two. Another number gives other bits.
        loop: Compile a device's logical shards as one loop, for many of them or a large model;
            otherwise they are written out one after the other. Other bits too: compilers choose
            other code in loops. XLA's CPU backend is far slower there at convolutions.
    """
    if logical_shards & (logical_shards - 1):
        raise binding_error(
            "tree_reduction.logical_shards",
            f" = {logical_shards}: give a power of two, for sums are taken of pairs.",
        )
    return sum.TreeReduction(
        sum.all_reduce,
        sum.reduce_scatter,
        logical_shards=logical_shards,
        loop=loop,
        exact_step=DeterministicStep,
    )
