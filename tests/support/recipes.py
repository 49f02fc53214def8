"""Shipped strategies by name."""

from research_dp.config import gin_internals, load

# All that are shipped.
SHIPPED = (
    *("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_keep", "hsdp", "hsdp_zero1", "spmd"),
    "spmd_fsdp",
)


def recipe(stem, *bindings, more=()):
    """A shipped strategy, or what more gin files make of it; small arrays are sharded too."""
    load.load([f"strategies/{stem}.gin", *more], ["shard_params.min_weight_size = 64", *bindings])
    return gin_internals.value_of("train.strategy")
