"""Objects that Python callers give in place of bindings: `@model_given_in_python()`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import gin
import optax

from research_dp.errors import binding_error
from research_dp.training.initial import InitialTree
from research_dp.types import DataSet, TrainableModel

Model = Annotated[TrainableModel, "a TrainableModel, e.g. of research_dp.from_linen"]
Data = Annotated[DataSet, "a DataSet, e.g. of research_dp.from_arrays"]
Optimizer = Annotated[optax.GradientTransformation, "an optimizer of Optax"]

_KINDS = {
    "model": TrainableModel,
    "data": DataSet,
    "optimizer": optax.GradientTransformation,
    "initial": InitialTree,
}
# Parameter of `train` -> what is bound to it in place of an object.
REFERENCES = {name: f"@{name}_given_in_python()" for name in _KINDS}
# Those of the innermost call of this thread that was given any.
_objects = contextvars.ContextVar[Mapping[str, Any]]("objects")


@contextlib.contextmanager
def given(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within it these are the objects, by parameter of `train`, unless there is none."""
    token = _objects.set(objects) if objects else None
    try:
        yield
    finally:
        if token is not None:
            _objects.reset(token)


def _giver(name: str) -> Callable[[], Any]:
    def give() -> Any:
        objects = _objects.get({})
        if name not in objects:
            problem = " was given as a Python object, which no file has. Give it again, as"
            problem += f" {name}=... of research_dp.run, plan, certify or compare."
            raise binding_error(f"train.{name}", problem)
        return objects[name]

    give.__annotations__["return"] = _KINDS[name]
    return give


for _name in _KINDS:
    gin.register(f"{_name}_given_in_python", module="python_objects")(_giver(_name))
