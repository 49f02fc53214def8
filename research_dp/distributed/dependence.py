"""What the elements of an array depend on: labels of values, and which primitives keep them.

A primitive counts as elementwise if `vmap` turns its scalar form into itself: JAX's own batching
rule is the proof, and there is no list of names.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
from jax.extend.core import JaxprEqn, Primitive


@dataclasses.dataclass(frozen=True)
class Dependence:
    """What the elements of an array depend on. A leaf, not a pytree.

    Attributes:
        kind: 'constant': all elements are equal, and the same on all devices. 'replicated': the
            array is the same on all devices. 'elementwise': each element depends on the element of
            one parameter at the same place in row-major order. 'mixed': none of these.
        detail: Path of the parameter, '' if it is not known which; of 'mixed' the reason.
    """

    kind: Literal["constant", "replicated", "elementwise", "mixed"]
    detail: str = ""

    def fits(self, wanted: Dependence) -> bool:
        """Whether a result with this label may be used where `wanted` is expected."""
        if self.kind == "elementwise":
            known = {self.detail, wanted.detail} - {""}
            return wanted.kind == "elementwise" and len(known) <= 1
        return self.kind == "constant" or self.kind == wanted.kind == "replicated"


CONSTANT = Dependence("constant")
REPLICATED = Dependence("replicated")


def elementwise(path: str = "") -> Dependence:
    """The label of an array that is sharded as the parameter of this path."""
    return Dependence("elementwise", path)


def mixed(reason: str) -> Dependence:
    """The label of an array whose elements depend on several elements of a parameter."""
    return Dependence("mixed", reason)


def join(name: str, one: Dependence, other: Dependence) -> Dependence:
    """The label of what depends on both, element by element."""
    if one.kind == "mixed" or other == CONSTANT:
        return one
    if other.kind == "mixed" or one == CONSTANT:
        return other
    if one.kind == other.kind == "elementwise" and one.fits(other):
        return one if one.detail else other
    return one if one == other else mixed(f"{name} of {name_of(one)} and {name_of(other)}")


def name_of(label: Dependence) -> str:
    """What a label depends on, for a message."""
    if label.kind == "elementwise":
        return label.detail or "a shard"
    return "an array that is not sharded with the parameter"


def is_deterministic(equation: JaxprEqn) -> bool:
    """Whether equal operands give equal results on all devices: no collective, callback, draw."""
    return not equation.effects and equation.primitive.name != "rng_uniform"


def is_elementwise(equation: JaxprEqn) -> bool:
    """Whether each element of the results depends on the same element of each operand alone."""
    avals: list[Any] = [v.aval for v in equation.invars]
    results: list[Any] = list(equation.outvars)
    operands = tuple((x.ndim, x.dtype) for x in avals)
    widest = max((x.shape for x in avals), key=len, default=None)
    if {v.aval.shape for v in results} != {widest} or not is_deterministic(equation):
        return False
    try:
        return _maps_scalars(equation.primitive, tuple(equation.params.items()), operands)
    except TypeError:  # a parameter that cannot be hashed; no elementwise primitive has one
        return False


@functools.cache
def _maps_scalars(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], operands: tuple[Any, ...]
) -> bool:
    """Whether a primitive is the `vmap` of its own application to scalars.

    Args:
        primitive: The primitive.
        params: Its parameters.
        operands: (rank, dtype) of each operand; those of rank 0 are common to all elements.
    """
    ranks = [rank for rank, _ in operands]
    if not set(ranks) <= {0, max(ranks)}:
        return False

    def function(*scalars: Any) -> Any:
        return primitive.bind(*scalars, **dict(params))

    for _ in range(max(ranks)):
        function = jax.vmap(function, in_axes=tuple(0 if rank else None for rank in ranks))
    arrays = [jax.ShapeDtypeStruct((2,) * rank, dtype) for rank, dtype in operands]
    try:
        program = jax.make_jaxpr(function)(*arrays).jaxpr
    except Exception:  # not for scalars, or without a rule for vmap: whatever it raises
        return False
    if not program.eqns:  # JAX leaves out a cast that changes nothing
        return set(program.outvars) <= set(program.invars)
    only = program.eqns[0]
    return (
        len(program.eqns) == 1
        and only.primitive is primitive
        and only.params == dict(params)
        and only.invars == program.invars
        and only.outvars == program.outvars
    )
