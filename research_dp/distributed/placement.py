"""Puts trees of arrays on shardings, reads global arrays back, and counts bytes on a device."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from research_dp.distributed.collectives import flat_axes
from research_dp.distributed.sharding import by_path, fitted, key_data, path_name
from research_dp.errors import UsageError
from research_dp.types import PyTree


def shardings(mesh: Mesh | AbstractMesh, specs: PyTree) -> PyTree:
    """`NamedSharding`s for a tree of `PartitionSpec`s; a `Sharding` in the tree is kept."""

    def on_mesh(path: Any, spec: Any) -> Sharding:
        if isinstance(spec, Sharding):
            return spec
        where = f" of {path_name(path)!r}" if path else ""
        if not isinstance(spec, PartitionSpec):
            raise UsageError(f"{spec!r}{where} is no jax.sharding.PartitionSpec.")
        if missing := [a for dim in spec for a in flat_axes(dim) if a not in mesh.axis_names]:
            raise UsageError(
                f"{spec}{where}: axis {missing[0]!r} is not found in mesh {dict(mesh.shape)}. "
                "Name one of the mesh's axes."
            )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(on_mesh, specs)  # a PartitionSpec is a leaf


def of_parts(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array that is stored with its slices cut in parts, as it is meant.

    `sharding` is the stored one; its mesh axis is split in two, so that no element moves.
    """
    dim = next(i for i, name in enumerate(sharding.spec) if name is not None)
    mesh, name = sharding.mesh, flat_axes(sharding.spec[dim])[0]
    at = mesh.axis_names.index(name)
    sizes = list(mesh.devices.shape)
    sizes[at : at + 1] = shape[dim], sizes[at] // shape[dim]
    names = [*mesh.axis_names[: at + 1], f"{name}_parts", *mesh.axis_names[at + 1 :]]
    finer = Mesh(mesh.devices.reshape(sizes), names)
    return NamedSharding(finer, PartitionSpec(*(None,) * dim, name, f"{name}_parts"))


def on_host(tree: PyTree) -> PyTree:
    """The whole arrays, as numpy's; a collective, if this process lacks a part of one."""

    def one(x: Any) -> Any:
        has_all = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
        return x if has_all else multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(one, tree))


def nbytes(tree: PyTree) -> tuple[int, int]:
    """Bytes of a tree of arrays with shardings, abstract ones too: (per device, in total)."""
    leaves = jax.tree.leaves(tree)
    local = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    return local, sum(x.size * x.dtype.itemsize for x in leaves)


def place(tree: PyTree, tree_shardings: PyTree, *, full: bool = False) -> PyTree:
    """Puts this process's part of each host array on its sharding, as global arrays.

    `tree` has the rows of this process's devices, in global order, or `full` arrays, the same in
    every process; arrays that are global already are resharded. `tree_shardings` is one for all
    leaves, or a tree in which None leaves a leaf where it is.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    treedef: Any = jax.tree.structure(tree)
    if isinstance(tree_shardings, Sharding):
        targets = [tree_shardings] * len(flat)
    else:
        targets = treedef.flatten_up_to(tree_shardings)
    leaves = [x for _, x in flat]
    chosen = [i for i, target in enumerate(targets) if target is not None]
    for i in list(chosen):
        x, target = leaves[i], targets[i]
        is_global = isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True)
        alone = is_global or jax.process_count() == 1
        if alone or full:  # else the number of rows depends on the process: jax checks it
            _check_divides(flat[i][0], x, target)
        with jax.transfer_guard_host_to_device("allow"):  # who calls this asks for it
            if not alone and full:
                x = x if isinstance(x, jax.Array) else np.asarray(x)
                leaves[i] = jax.make_array_from_callback(x.shape, target, x.__getitem__)
            elif not alone:
                leaves[i] = jax.make_array_from_process_local_data(target, np.asarray(x))
            elif type(x) is np.ndarray and len(target.device_set) > 1:
                # Half the time of device_put, which matters beside a step of a few milliseconds.
                leaves[i] = jax.make_array_from_callback(x.shape, target, x.__getitem__)
                chosen.remove(i)
    arrays = jax.device_put([leaves[i] for i in chosen], [targets[i] for i in chosen])
    for i, x in zip(chosen, arrays, strict=True):
        target = targets[i]
        explicit = isinstance(target, NamedSharding) and target.mesh.are_all_axes_explicit
        if isinstance(x, jax.core.Tracer) and not explicit:
            # Under `jit` with `Auto` axes the compiler ignores device_put, but not this.
            x = jax.lax.with_sharding_constraint(x, target)
        leaves[i] = x
    return treedef.unflatten(leaves)


put = functools.partial(place, full=True)


def refuse_deleted(what: str, tree: PyTree, advice: str = "") -> None:
    """Raises UsageError for arrays without memory, at which the runtime may end the process."""
    advice = advice or (
        "train_step takes the memory of the state that it is given: go on with the one that it "
        "returned, or give it a copy: jax.tree.map(jnp.copy, state)."
    )
    for x in jax.tree.leaves(tree):  # each step waits for it: no `isinstance(x, jax.Array)`
        if isinstance(x, jax.core.Tracer) or not getattr(x, "is_deleted", bool)():
            continue
        named = next(path for path, other in by_path(tree).items() if other is x)
        raise UsageError(f"{what} has {named}, which was deleted or given away. {advice}")


def _check_divides(path: Any, x: Any, sharding: Sharding) -> None:
    if not isinstance(sharding, NamedSharding):
        return
    shape = np.shape(x)
    for dim, names in enumerate(sharding.spec):
        parts = math.prod(sharding.mesh.shape[axis] for axis in flat_axes(names))
        if dim >= len(shape):
            problem = f"rank {len(shape)} is too small for {sharding.spec}. Leave it out, or"
        elif shape[dim] % parts:
            problem = (
                f"dim {dim} of length {shape[dim]} is not divisible by {parts}, the devices on "
                f"mesh axis {names!r}. Pad or drop rows, or"
            )
        else:
            continue
        name = f"{path_name(path)!r} of shape {shape}" if path else f"an array of shape {shape}"
        raise UsageError(f"{name} cannot be sharded: {problem} replicate it with PartitionSpec().")


def local_indices(sharding: NamedSharding, shape: tuple[int, ...], dim: int) -> np.ndarray:
    """Indices along `dim` of a global array that are on this process's devices, ascending."""
    parts = sharding.addressable_devices_indices_map(shape).values()
    indices = np.arange(shape[dim], dtype=np.int64)
    return np.unique(np.concatenate([indices[part[dim]] for part in parts if part is not None]))


def fingerprint(
    tree: PyTree,
    alive: Callable[[], None] = lambda: None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """SHA-256 over a tree of global arrays: path, dtype, shape and bytes of each, sorted by path.

    The host calls `alive` before it reads each: billions of parameters take minutes. `shapes` are
    those without padding (`cut_shapes`).
    """
    digest = hashlib.sha256()
    for path, leaf in by_path(key_data(tree)).items():
        alive()
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        array = np.asarray(leaf)
        array = fitted(array, (shapes or {}).get(path, array.shape))
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class ProgramMemory(NamedTuple):
    """Bytes on a device, as the compiler reports them."""

    temp_bytes: int
    peak_bytes: int
    needed_bytes: int  # the peak, or all arguments, results and temporaries at once

    @classmethod
    def of(cls, program: Any) -> ProgramMemory:
        """The memory of what `lower(...).compile()` returned."""
        memory = program.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        at_once = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
        peak = memory.peak_memory_in_bytes
        return cls(memory.temp_size_in_bytes, peak, max(peak, at_once))
