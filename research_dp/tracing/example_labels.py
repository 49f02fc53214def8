"""Labels that say what an array of a loss's program is made of, by example, and where dims go."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

Kind = Literal[
    "same", "rows", "place", "count", "sum", "mean", "local", "mixed", "drawn", "unknown"
]


@dataclasses.dataclass(frozen=True)
class Examples:
    """What an array is made of. A leaf, not a pytree.

    'same': no example. 'rows': dim `dim` counts examples, `major` times over, and each part is made
    of its example; `ONE`: of one, in a loop over them. 'place': of places along `dim` on a device.
    'count': their number. 'sum': a sum over the device's examples; 'mean': a quotient of sums;
    'local': another function of these. 'mixed': of several examples; 'drawn': of random numbers for
    several; 'unknown'. `detail` says how.

    Attributes:
        column: In an array of indices, which of the last dim is the example's own place.
        over: Mesh axes over which a sum was summed, or rows were gathered.
        where: The operation, and the line of the source, that made it no sum over examples.
    """

    kind: Kind = "same"
    dim: int | None = None
    major: int = 1
    column: int | None = None
    detail: str = ""
    over: frozenset[str] = frozenset()
    where: str = ""

    @property
    def is_same_everywhere(self) -> bool:
        return self.kind == "same"

    @property
    def has_dim(self) -> bool:
        return self.dim not in (None, ONE)

    def at(self, dim: int) -> Examples:
        """The same with another dim that counts examples."""
        return dataclasses.replace(self, dim=dim, column=None)

    def mixed_by(self, operation: str) -> Examples:
        """The label of what depends on this array by control flow."""
        made = mixed(detail=f"by a branch or loop: {operation} a number made of others")
        return self if self.kind in SPOILT else made if self.kind in SUMS else Examples("unknown")

    def join(self, operation: str, other: Examples) -> Examples:
        """The label of what is either of two arrays, or is carried from turn to turn."""
        if self == other or other.kind == "same" or self.kind in SPOILT:
            return self
        is_first = self.kind == "same" and other.dim != ONE
        return other if other.kind in SPOILT or is_first else Examples("unknown")

    def scanned(self) -> Examples:
        """The label of what one turn of a loop over dim 0 gets."""
        return self if self.dim is None else self.at(self.dim - 1)

    def stacked(self) -> Examples:
        """The label of what the turns of a loop give, along a new dim 0."""
        return self if self.dim is None else self.at(self.dim + 1)


ONE = -1
SPOILT = ("mixed", "drawn", "unknown")
SUMS = ("sum", "mean", "local")
SAME, ZERO, SUM, LOCAL, ADDED = (
    Examples(),
    Examples(detail="zero"),
    Examples("sum"),
    Examples("local"),
    Examples("local", detail="added"),  # a sum plus a constant: right only in a scaled mean
)
UNKNOWN, DRAWN = Examples("unknown"), Examples("drawn")
mixed = functools.partial(Examples, "mixed")
EACH_OTHER = mixed(detail="examples with each other")
BY_PLACE = mixed(detail="examples by their place on the device")
WITH_SUM = mixed(detail="an example with a number made of others")


def _unless(dims: Any, dim: int) -> int | None:
    return None if dim in (dims if isinstance(dims, tuple | list) else (dims,)) else dim


def _reduced(equation: Any, dim: int) -> int | None:
    axes = equation.params["axes"]
    return None if dim in axes else dim - sum(axis < dim for axis in axes)


def _windows(equation: Any, dim: int) -> int | None:
    return dim if equation.params["window_dimensions"][dim] == 1 else None


def _matrices(equation: Any, dim: int) -> int | None:
    return dim if dim < len(equation.invars[0].aval.shape) - 2 else None


def _whole(equation: Any, dim: int) -> int | None:
    shapes = {x.aval.shape[dim] for x in (*equation.invars, *equation.outvars) if x.aval.shape}
    return dim if len(shapes) == 1 else None


def _convolved(equation: Any, dim: int) -> int | None:
    numbers, groups = equation.params["dimension_numbers"], equation.params["batch_group_count"]
    return numbers.out_spec[0] if dim == numbers.lhs_spec[0] and groups == 1 else None


# Where the dim that counts examples goes; None: the operation combines what lies along it.
MOVES: dict[str, Callable[[Any, int], int | None]] = {
    "broadcast_in_dim": lambda e, dim: e.params["broadcast_dimensions"][dim],
    "transpose": lambda e, dim: e.params["permutation"].index(dim),
    "stack": lambda e, dim: dim + (e.params["axis"] <= dim),
    "pad": lambda e, dim: None if any(e.params["padding_config"][dim]) else dim,
    "sort": lambda e, dim: _unless(e.params["dimension"], dim),
    "rev": lambda e, dim: _unless(e.params["dimensions"], dim),
    "top_k": lambda e, dim: _unless(e.params.get("axis", len(e.invars[0].aval.shape) - 1), dim),
    "fft": lambda e, dim: (
        dim if dim < len(e.invars[0].aval.shape) - len(e.params["fft_lengths"]) else None
    ),
    "conv_general_dilated": _convolved,
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _whole),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        lambda e, dim: _unless(e.params["axis"], dim),
    ),
    **dict.fromkeys((f"reduce_{x}" for x in ("sum", "max", "min", "prod", "and", "or")), _reduced),
    **dict.fromkeys(("argmax", "argmin"), _reduced),
    **dict.fromkeys((f"reduce_window{x}" for x in ("", "_sum", "_max", "_min")), _windows),
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "qr", "svd", "eigh"), _matrices),
}


_LINEAR = {
    "neg",
    "convert_element_type",
    "copy",
    "real",
    "imag",
    "stop_gradient",
    "reduce_precision",
}


def keeps_alike(equation: Any, dim: int, rows: int) -> bool:
    """Whether rows along a dim of the result are alike, if those of each operand are."""
    name, params = equation.primitive.name, equation.params
    lengths = [x.aval.shape[dim] for x in equation.invars if dim < len(x.aval.shape)]
    if name == "concatenate":  # whole batches: several views, say
        return dim != params["dimension"] or all(length % rows == 0 for length in lengths)
    if name == "pad":
        return not any(params["padding_config"][dim])
    if name.startswith("cum"):
        return dim != params["axis"]
    if name == "dynamic_update_slice":
        return len(set(lengths[:2])) == 1
    if name.startswith("scatter"):
        shape, written = equation.invars[0].aval.shape, equation.invars[2].aval.shape
        return any(
            d == dim and shape[d] == written[own] for own, d in window_dims(equation).items()
        )
    return True


def window_dims(equation: Any) -> dict[Any, int]:
    """Dims of what a scatter writes at each place -> of the array that it writes to."""
    numbers = equation.params["dimension_numbers"]
    dropped = *numbers.inserted_window_dims, *numbers.operand_batching_dims
    window = [d for d in range(len(equation.invars[0].aval.shape)) if d not in dropped]
    return dict(zip(numbers.update_window_dims, window, strict=True))


def of_sums(name: str, inputs: list[Examples]) -> Examples:
    """The label of an elementwise function of sums over examples, their number and constants."""
    kinds, first = [x.kind for x in inputs], inputs[0]
    made = next((x for x in inputs if x.kind in SUMS), first)
    if name in _LINEAR:
        return first
    if name in ("add", "sub") and ZERO in inputs and (name == "add" or first != ZERO):
        return made
    if name in ("add", "sub"):
        alike = {("sum" if x.kind == "count" else x.kind, x.over) for x in inputs}
        if set(kinds) <= {"mean", "same"} and kinds.count("mean") == 1:
            return made  # (a / b) + c = (a + c b) / b
        # A regulariser may be added to a mean that is scaled up later.
        return made if len(alike) == 1 else ADDED if "same" in kinds else LOCAL
    if name == "mul" and {"same", "count"} & set(kinds):
        return SUM if made.kind not in SUMS and "same" in kinds else made
    if name == "mul":
        return SUM if kinds.count("mean") == 1 else LOCAL
    if name == "div" and kinds[1] in ("same", "count"):
        return first if first.kind in SUMS else SAME
    if name == "div":
        return Examples("mean") if kinds[0] == "sum" else LOCAL
    if name == "select_n":
        cases = {x for x in inputs[1:] if x != ZERO}
        return cases.pop() if len(cases) == 1 and SAME not in cases else LOCAL
    return LOCAL


def of_product(equation: Any, inputs: list[Examples]) -> Examples:
    """The label of a `dot_general`."""
    others = [x for x in inputs if x.kind != "same"]
    if any(x.kind in SUMS for x in others):
        if {x.kind for x in others} & {"rows", "place"}:
            return WITH_SUM
        return others[0] if len(others) == 1 else LOCAL
    if {x.kind for x in others} == {"rows", "place"}:
        return BY_PLACE
    contract, batch = equation.params["dimension_numbers"]
    ranks = [len(x.aval.shape) for x in equation.invars]
    goes: set[tuple[str, int]] = set()  # where each operand's examples go
    for side, label in enumerate(inputs):
        if label.kind == "same":
            continue
        dim, summed, kept = label.dim or 0, contract[side], batch[side]
        if dim in summed:
            goes.add(("sum", summed.index(dim)))
        elif dim in kept or dim == ONE:
            goes.add(("dim", kept.index(dim) if dim != ONE else ONE))
        else:
            free = [d for d in range(ranks[side]) if d not in (*summed, *kept)]
            start = len(kept) + (ranks[0] - len(contract[0]) - len(kept) if side else 0)
            goes.add(("dim", start + free.index(dim)))
    if len(goes) > 1 or len({x.major for x in others}) > 1:
        return EACH_OTHER
    ((how, dim),) = goes
    return SUM if how == "sum" else others[0].at(dim)


def names_itself(dim: int | None, indices: Examples, index_map: Sequence[int]) -> bool:
    """Whether the indices along a dim that counts examples are each example's own place."""
    alone = len(index_map) == 1 and indices.detail == "own"
    own = [column for column, mapped in enumerate(index_map) if mapped == dim]
    return bool(own) and (alone or indices.column == own[0])


def of_gather(equation: Any, inputs: list[Examples]) -> Examples:
    """The label of rows that are looked up."""
    (operand, indices), params = inputs, equation.params
    numbers, rank = params["dimension_numbers"], len(equation.outvars[0].aval.shape)
    if operand.kind in SUMS or indices.kind in SUMS:
        linear = operand.kind == "sum" and indices.kind == "same"
        is_mixed = {operand.kind, indices.kind} & {"rows", "place"}
        return WITH_SUM if is_mixed else SUM if linear else LOCAL
    free = [d for d in range(rank) if d not in numbers.offset_dims]
    if {operand.dim, indices.dim} <= {None, ONE}:  # in a loop over examples
        return Examples("rows", ONE)
    if operand.kind == "same":
        dim = free[indices.dim or 0]
        return Examples("place" if indices.kind == "place" else "rows", dim, indices.major)
    dropped = *numbers.collapsed_slice_dims, *numbers.operand_batching_dims
    kept = [d for d in range(len(equation.invars[0].aval.shape)) if d not in dropped]
    if operand.dim in numbers.operand_batching_dims:
        number = numbers.operand_batching_dims.index(operand.dim)
        dim = numbers.start_indices_batching_dims[number]
        if indices.kind == "place":  # each example is looked up by its place on the device
            return BY_PLACE
        if indices.kind == "same" or indices.dim == dim:
            return Examples("rows", free[dim], operand.major)
    elif operand.dim in kept and indices.kind == "same":
        if params["slice_sizes"][operand.dim] == equation.invars[0].aval.shape[operand.dim]:
            return operand.at(numbers.offset_dims[kept.index(operand.dim)])
    elif names_itself(operand.dim, indices, numbers.start_index_map):
        return Examples("rows", free[indices.dim or 0], operand.major)
    return BY_PLACE
