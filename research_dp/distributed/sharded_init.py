"""Variables made where they lie, so that no device ever holds the whole model."""

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
    """Runs an initialiser of sharded parameters so that each is made where it lies.

    For modules of `shard_module_params` classes, whose `init` inside mapped axes makes whole
    parameters on each device before it cuts them. Here the initialiser is only traced there, for
    where things lie. The values come from axes of size 1, where a shard is the whole, computed by
    `jit` as global arrays with those shardings: the bits of the unsharded module's `jit(init)`.

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

    def whole(*args: Any) -> PyTree:
        function = init
        for axis in mesh.axis_names:
            function = jax.vmap(function, None, axis_name=axis, axis_size=1)
        values = unboxed(function(*args))
        return jax.tree.map(lambda x: x.reshape(x.shape[len(mesh.axis_names) :]), values)

    def lies(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*names_of(leaf) if split_over(leaf) else ()))

    values = jax.jit(whole, out_shardings=jax.tree.map(lies, boxes, is_leaf=is_box))(*args)
    return jax.tree.map(with_value, boxes, values, is_leaf=is_box)
