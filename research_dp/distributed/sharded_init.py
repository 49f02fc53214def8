"""Initialises variables as shards, so that no device needs memory for the full model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.distributed.boxed import is_box, names_of, split_over, unboxed, with_value

PyTree = Any


@gin.register(module="distributed")
@checked
def init_sharded(init: Callable[..., PyTree], mesh: Mesh | AbstractMesh, *args: Any) -> PyTree:
    """Runs an initialiser of sharded parameters such that each device computes its shards.

    For modules of `shard_module_params` classes, whose `init` inside mapped axes makes the full
    parameters on each device. Here that is only traced, for the shardings. The values come from
    axes of size 1, where a shard is the full array; `jit` computes them as global arrays with those
    shardings. They are the bits of the unsharded module's `jit(init)`.

    Args:
        init: (*args) -> tree of arrays and boxes, e.g. `module.init` or
            `lambda key: nnx.state(Model(rngs=nnx.Rngs(key)))`. Random keys may not depend on the
            device.
        mesh: The mesh whose axes the boxes name.
        *args: Arrays, such as a key and an example batch.

    Returns:
        Global arrays, boxed as `init` boxes them under `shard_map`.
    """
    on_mesh = jax.shard_map(
        init, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    boxes = jax.eval_shape(on_mesh, *args)

    def unsharded(*args: Any) -> PyTree:
        function = init
        for axis in mesh.axis_names:
            function = jax.vmap(function, None, axis_name=axis, axis_size=1)
        values = unboxed(function(*args))
        return jax.tree.map(lambda x: x.reshape(x.shape[len(mesh.axis_names) :]), values)

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*names_of(leaf) if split_over(leaf) else ()))

    shardings = jax.tree.map(sharding, boxes, is_leaf=is_box)
    values = jax.jit(unsharded, out_shardings=shardings)(*args)
    return jax.tree.map(with_value, boxes, values, is_leaf=is_box)
