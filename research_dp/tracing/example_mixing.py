"""Whether an example's loss, metric or state depends on other examples: rules for a loss's program.

Strategies split the batch. What a loss computes of its part is right if it is a sum over examples,
each treated alike, or goes through sums over the batch's axes. `interpret` labels each value of the
program by these rules; a primitive that has none is not decided.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.tracing import example_labels as labels
from research_dp.tracing.example_labels import SAME, SUM, SUMS, UNKNOWN, Examples
from research_dp.tracing.jaxpr import maps_scalars, source_line

_COUNTING = {"add", "sub", "mul", "div", "neg", "convert_element_type"}
_UNCHANGED = {
    *("name", "sharding_constraint", "copy", "stop_gradient", "pvary", "pcast", "device_put"),
    *("random_clone", "random_wrap", "random_unwrap", "random_seed", "reduce_precision"),
}
_ADDED, _GATHERED = {"psum", "psum_invariant"}, {"all_gather", "all_gather_invariant", "all_to_all"}
_ALONG = ("all_gather_dimension", "split_axis", "concat_axis")
_COLLECTIVES = {*_ADDED, *_GATHERED, "pmax", "pmin", "ppermute", "reduce_scatter"}
_LINEAR_MOVES = {
    "broadcast_in_dim",
    "transpose",
    "reshape",
    "squeeze",
    "reduce_sum",
    "slice",
    "rev",
}


class ExampleRules:
    """The rules for a program of `rows` examples, of which a prime factor divides no other length.

    `unit` is that factor; `axes` are those that the batch is split over.
    """

    def __init__(self, rows: int, unit: int, axes: Sequence[str]):
        self.rows, self.unit, self.axes = rows, unit, frozenset(axes)

    def counts(self, length: int) -> bool:
        """Whether a dim of this length counts examples."""
        return length > 0 and length % self.unit == 0

    def of_constant(self, value: Any) -> Examples:
        """The label of an array that the program has."""
        is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
        if isinstance(value, jax.core.Tracer) or is_key:
            return SAME
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype != np.bool_ and array in (self.rows, -self.rows):
            return Examples("count")
        for dim, length in enumerate(array.shape):
            if self.counts(length) and (array != array.take([0], dim)).any():
                return Examples("place", dim)
        return SAME if array.any() else labels.ZERO

    def apply(self, equation: Any, inputs: Sequence[Examples]) -> list[Examples]:
        """Labels of the results of a primitive."""
        found = self._labels(equation, list(inputs))
        results = found if isinstance(found, list) else [found] * len(equation.outvars)
        return self.called(equation, inputs, results)

    @staticmethod
    def called(equation: Any, inputs: Sequence[Any], results: list[Examples]) -> list[Examples]:
        """The results of an operation or a call, with the line of the first that is no sum.

        The line of a call is the user's: what it calls may be a function of a library.
        """
        known = {x.where for x in inputs}

        def one(x: Examples) -> Examples:
            if x.kind not in (*labels.SPOILT, "mean", "local") or (x.where and x.where in known):
                return x
            name = x.where.partition(" at ")[0] or equation.primitive.name
            return dataclasses.replace(x, where=f"{name} at {source_line(equation)}")

        return [one(x) for x in results]

    def _labels(self, equation: Any, inputs: list[Examples]) -> Examples | list[Examples]:
        name, params = equation.primitive.name, equation.params
        shape = equation.outvars[0].aval.shape if equation.outvars else ()
        if name == "iota" and self.counts(shape[params["dimension"]]):
            return Examples("place", params["dimension"], detail="own")
        if not (name in _COUNTING and {x.kind for x in inputs} <= {"same", "count", *SUMS}):
            inputs = [SAME if x.kind == "count" else x for x in inputs]
        others = [x for x in inputs if x.kind != "same"]
        if name.startswith("random_") and name not in _UNCHANGED:
            return self._random(name, shape, inputs, others)
        if spoilt := [x for kind in labels.SPOILT for x in inputs if x.kind == kind]:
            return spoilt[0]
        if name == "axis_index":
            return UNKNOWN
        if not others:
            made = (d for d, n in enumerate(shape) if self.counts(n))
            places = [d for d in made if not labels.keeps_alike(equation, d, self.rows)]
            if places:  # cumsum(ones(B)), say
                return Examples("place", places[0])
            keeps = name in ("broadcast_in_dim", "convert_element_type", "reshape")
            return inputs[0] if keeps else SAME
        if name in _COLLECTIVES:
            return self._collective(name, params, inputs)
        if name in ("concatenate", "split", "slice"):
            return getattr(self, f"_{name}")(equation, inputs)
        if name in ("dot_general", "gather"):
            rule = labels.of_product if name == "dot_general" else labels.of_gather
            return rule(equation, inputs)
        if name in ("reshape", "squeeze"):
            return self._reshape(equation, others[0])
        if name.startswith("scatter"):
            return self._scatter(equation, inputs)
        if name in _UNCHANGED or name == "optimization_barrier":
            return list(inputs) if name == "optimization_barrier" else inputs[0]
        if name in labels.MOVES:
            return self._moved(equation, inputs, others)
        if maps_scalars(equation):
            is_index = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer)
            return self._elementwise(name, inputs, others, is_index)
        return UNKNOWN

    def _random(
        self, name: str, shape: Sequence[int], inputs: list[Examples], others: list[Examples]
    ) -> Examples:
        """Keys made of a key, or numbers drawn with it: each example needs a key of its own."""
        key, dim = inputs[0], next((d for d, n in enumerate(shape) if self.counts(n)), None)
        if key.kind in ("rows", "drawn", "mixed") or (key.kind == "unknown" and dim is None):
            return key
        if name in ("random_split", "random_fold_in"):
            own = [x for x in others if x is not key]
            return own[0] if own else SAME if dim is None else Examples("place", dim)
        return SAME if dim is None and key.kind == "same" else labels.DRAWN

    def _moved(self, equation: Any, inputs: list[Examples], others: list[Examples]) -> Examples:
        """An operation along dims, of arrays that must have their examples at the same place."""
        name, label = equation.primitive.name, others[0]
        if any(x.kind in SUMS for x in others):
            if {x.kind for x in others} & {"rows", "place"}:
                return labels.WITH_SUM
            is_linear = name in _LINEAR_MOVES or (name == "stack" and len(others) == len(inputs))
            return label if is_linear and len(set(others)) == 1 else labels.LOCAL
        if label.dim == labels.ONE:
            return label
        if len({(x.kind, x.dim, x.major) for x in others}) > 1:
            return UNKNOWN if name.startswith("conv") else labels.EACH_OTHER
        if name.startswith("dynamic") and any(x.kind != "same" for x in inputs[2:]):
            return UNKNOWN
        if name.startswith("conv") and inputs[1].kind != "same":
            return UNKNOWN  # a kernel of each example's own, in groups
        dim = labels.MOVES[name](equation, label.dim or 0)
        if dim is not None:
            return label.at(dim)
        if name == "reduce_sum":
            return SUM if label.kind == "rows" else SAME
        if name.startswith("dynamic"):
            return UNKNOWN
        return labels.LOCAL if name.startswith(("reduce", "arg")) else labels.EACH_OTHER

    def _elementwise(
        self, name: str, inputs: list[Examples], others: list[Examples], is_index: bool
    ) -> Examples:
        kinds, first = {x.kind for x in others}, inputs[0]
        if kinds <= {"rows", "place"}:
            if kinds == {"place"}:
                # Indices as JAX makes them positive: select_n(i < 0, i, i + rows).
                if name == "lt" and first.detail == "own" and inputs[1] == labels.ZERO:
                    return dataclasses.replace(first, detail="negative")
                if name == "select_n" and (first.detail, inputs[1].detail) == ("negative", "own"):
                    return inputs[1]
                is_cast = name == "convert_element_type"
                return first if is_cast else Examples("place", others[0].dim)
            if len({(x.dim, x.major) for x in others}) > 1:
                return labels.EACH_OTHER
            if "place" in kinds:  # integers may be indices of its own rows in a flat array
                return UNKNOWN if is_index else labels.BY_PLACE
            return others[0].at(others[0].dim or 0)
        if kinds & {"rows", "place"}:
            return labels.WITH_SUM
        return labels.of_sums(name, inputs)

    def _reshape(self, equation: Any, label: Examples) -> Examples:
        old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        if not label.has_dim:
            return label
        before = math.prod(old[: label.dim]) * label.major
        for dim, length in enumerate(new):
            major, rest = divmod(before, math.prod(new[:dim]))
            if self.counts(length) and not rest and major and length % (major * self.rows) == 0:
                is_index = dim + 1 < len(new) and new[-1:] == old[-1:]
                column = label.column if is_index else None
                return dataclasses.replace(label, dim=dim, major=major, column=column)
        is_cut = label.dim == 0 and math.prod(old[1:]) == math.prod(new[2:])
        return UNKNOWN if is_cut else labels.mixed(detail="parts of examples in another order")

    def _part(self, label: Examples, length: int, start: int, stop: int) -> Examples:
        """A range of the dim that counts examples: all of them, some times over; or one of them."""
        whole = length // label.major
        if start % whole == stop % whole == 0:
            return dataclasses.replace(label, major=(stop - start) // whole)
        return UNKNOWN if stop - start == whole // self.rows else labels.BY_PLACE

    def _slice(self, equation: Any, inputs: list[Examples]) -> Examples:
        (label,), params = inputs, equation.params
        if not label.has_dim:
            return label
        if params["strides"] and params["strides"][label.dim] > 1:
            return labels.BY_PLACE
        bounds = (params[name][label.dim] for name in ("start_indices", "limit_indices"))
        return self._part(label, equation.invars[0].aval.shape[label.dim], *bounds)

    def _split(self, equation: Any, inputs: list[Examples]) -> list[Examples]:
        (label,), sizes = inputs, equation.params["sizes"]
        if label.dim != equation.params["axis"]:
            return [label] * len(sizes)
        ends = np.cumsum([0, *sizes]).tolist()
        return [self._part(label, ends[-1], *ends[i : i + 2]) for i in range(len(sizes))]

    def _concatenate(self, equation: Any, inputs: list[Examples]) -> Examples:
        dim, shape = equation.params["dimension"], equation.outvars[0].aval.shape
        others = [x for x in inputs if x.kind != "same"]
        if any(x.kind in SUMS for x in others):
            return others[0] if set(inputs) == {others[0]} else labels.LOCAL
        if len({(x.dim, x.major if dim != x.dim else 1) for x in others}) > 1:
            return labels.EACH_OTHER
        if dim == others[0].dim:
            lengths = [x.aval.shape[dim] for x in equation.invars]
            parts = {n // (x.major * self.rows) for n, x in zip(lengths, inputs, strict=True)}
            is_rows = all(x.kind == "rows" for x in inputs) and len(parts) == 1
            major = sum(x.major for x in inputs)
            return Examples("rows", dim, major) if is_rows else labels.BY_PLACE
        places = [i for i, x in enumerate(inputs) if x.kind == "place"]
        if not places:
            return others[0]
        if dim != len(shape) - 1 or len(places) > 1 or inputs[places[0]].detail != "own":
            return labels.BY_PLACE
        column = sum(x.aval.shape[dim] for x in equation.invars[: places[0]])
        return Examples("rows", others[0].dim, column=column)

    def _scatter(self, equation: Any, inputs: list[Examples]) -> Examples:
        operand, indices, updates = inputs
        numbers = equation.params["dimension_numbers"]
        if any(x.kind in SUMS for x in inputs):
            is_mixed = any(x.kind in ("rows", "place") for x in inputs)
            return labels.WITH_SUM if is_mixed else labels.LOCAL
        if indices.kind == "same":
            shapes = [x.aval.shape for x in (equation.invars[0], equation.invars[2])]
            window = labels.window_dims(equation)
            dim = window.get(updates.dim) if updates.has_dim else operand.dim
            fits = dim is not None and operand.dim in (None, dim) and dim in window.values()
            return Examples("rows", dim) if fits and shapes[0][dim] in shapes[1] else UNKNOWN
        for dim, own in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        ):
            if own == indices.dim:
                return Examples("rows", dim)
        index_map = numbers.scatter_dims_to_operand_dims
        own = [dim for dim in index_map if labels.names_itself(dim, indices, index_map)]
        if own:
            return Examples("rows", own[0]) if operand.dim in (None, own[0]) else UNKNOWN
        adds = equation.primitive.name == "scatter-add" and operand.kind == "same"
        return SUM if adds else labels.LOCAL

    def _collective(
        self, name: str, params: dict[str, Any], inputs: list[Examples]
    ) -> list[Examples]:
        named = params.get("axes", params.get("axis_name"))
        axes = frozenset(named if isinstance(named, tuple | list) else (named,))

        def one(label: Examples) -> Examples:
            if label.kind in ("same", "count") or not axes & self.axes:
                return SAME if label.kind == "count" else label
            if name in _ADDED and label.kind != "sum":
                return labels.mixed(detail="over devices what is no sum over their examples")
            if params.get("axis_index_groups") or name not in _ADDED | _GATHERED:
                return UNKNOWN
            along = {params.get(x, label.dim) for x in _ALONG}
            if name in _GATHERED and along != {label.dim}:
                return labels.BY_PLACE
            over = label.over | axes
            return SAME if over >= self.axes else dataclasses.replace(label, over=over)

        return [one(label) for label in inputs]
