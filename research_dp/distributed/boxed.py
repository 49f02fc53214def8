"""Boxes around arrays that name the mesh axes of their dims: Linen's and NNX's.

A box, an `nn.Partitioned` or an `nnx.Variable` with metadata `out_sharding`, has a name for each
dim: the mesh axis that splits it, several as a tuple, or None. A bare array is replicated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from research_dp.argument_types import path_name
from research_dp.distributed.collectives import Axes, flat_axes
from research_dp.types import PyTree


def is_box(x: Any) -> bool:
    """Whether `x` is an `nn.Partitioned` (or of a subclass), or an `nnx.Variable`."""
    return isinstance(x, nn.Partitioned) or _is_variable(x)


def value_of(leaf: Any) -> Any:
    """The array in a box, or the bare array."""
    if _is_variable(leaf):
        return leaf.get_value()
    return leaf.value if is_box(leaf) else leaf


def names_of(leaf: Any) -> tuple[Any, ...]:
    """For each dim the axis that splits it, or None; names that a box lacks count as None."""
    names: Any = ()
    if _is_variable(leaf):
        names = leaf.get_metadata("out_sharding", None) or ()
    elif is_box(leaf):
        names = leaf.names
    return tuple(names) + (None,) * (np.ndim(value_of(leaf)) - len(names))


def split_over(leaf: Any) -> Axes:
    """The axes that the leaf is split over."""
    return tuple(axis for axis in flat_axes(names_of(leaf)) if axis is not None)


def with_value(leaf: Any, value: Any) -> Any:
    """The same leaf, with its names, around another array."""
    return leaf.replace(value=value) if is_box(leaf) else value


def with_name(leaf: Any, value: Any, dim: int, name: Any) -> Any:
    """The leaf around another array, whose `dim` an axis splits; bare, if no axis splits any."""
    names = names_of(leaf)
    names = (*names[:dim], name, *names[dim + 1 :])
    split = any(name is not None for name in names)
    if _is_variable(leaf):
        # Not eager: NNX would constrain a shard like a global array when it copies the Variable.
        sharding = names if split else None
        return leaf.replace(value=value, out_sharding=sharding, eager_sharding=False)
    return nn.Partitioned(value, names) if split else value


def unboxed(tree: PyTree) -> PyTree:
    """The tree with arrays instead of boxes."""
    return jax.tree.map(value_of, tree, is_leaf=is_box)


def leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """(path, box or bare array) of each leaf."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    return [(path_name(path), leaf) for path, leaf in flat]


def as_name(axis_name: str | Sequence[str]) -> str | Axes:
    """An axis as a name in a box: a string, or a tuple of several."""
    axes = flat_axes(axis_name)
    return axes[0] if len(axes) == 1 else axes


def _is_variable(x: Any) -> bool:
    # Flax NNX takes long to import; it is imported wherever a Variable exists.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)
