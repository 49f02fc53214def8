"""Frozen parameters: the model state has them, so that nothing trains them or sends their gradient.

They have no gradient and no optimizer state. Where parameters are sharded between steps, so are
they, and gathered like others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from research_dp.distributed.sharding import by_path, infer_sharding, is_key
from research_dp.errors import binding_error, check_patterns, some_of
from research_dp.types import Batch, LossOutput, PyTree, TrainableModel, Work

FROZEN = "frozen_params"  # the name of the frozen parameters in the model state
MODEL_STATE = "model_state/"  # begins the names of its arrays


@dataclasses.dataclass(frozen=True)
class FrozenModel(TrainableModel):
    """A model of which some parameters are in the model state, in `FROZEN`."""

    unfrozen: TrainableModel | None = None  # the model that trains all its parameters
    patterns: tuple[str, ...] = ()


def freeze(model: TrainableModel, patterns: str | Sequence[str], binding: str) -> TrainableModel:
    """The model without the parameters whose full paths match; `init` refuses what cannot be.

    `patterns` are regular expressions; () gives back the model that trains all. `binding` has them.
    """
    expressions = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if isinstance(model, FrozenModel) and model.unfrozen is not None:
        if model.patterns == expressions:
            return model
        model = model.unfrozen
    if not expressions:
        return model
    check_patterns(binding, expressions)

    def init(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        made = model.init(key, batch)
        if not isinstance(made, tuple) or len(made) != 2:
            return made  # what calls it says what is wrong
        params, model_state = made
        if not isinstance(params, Mapping):
            raise binding_error(binding, f" needs nested dicts of parameters, not {type(params)}.")
        flat = flatten_dict(params)
        paths = {keys: "/".join(map(str, keys)) for keys in flat}
        taken = matched(list(paths.values()), expressions, binding)
        frozen, trained = (
            unflatten_dict({k: x for k, x in flat.items() if (paths[k] in taken) is is_frozen})
            for is_frozen in (True, False)
        )
        return trained, _with_frozen(frozen, model_state, binding)

    def loss(
        params: PyTree, model_state: PyTree, batch: Any, keys: Any, **options: Any
    ) -> LossOutput:
        frozen = model_state[FROZEN]
        if (units := options.get("units")) and units.shardings is not None:
            size = jax.tree.leaves(units.shardings)[0].axis_size
            # Of units whose gradients are synchronised: those of trained parameters.
            both = joined(without_gradients(infer_sharding(frozen, None, size)), units.shardings)
            options["units"] = dataclasses.replace(units, shardings=both)
        out = model.loss(*with_frozen(params, model_state), batch, keys, **options)
        return out._replace(model_state=_with_frozen(frozen, out.model_state, binding))

    def work(example: Mapping[str, jax.ShapeDtypeStruct]) -> Work:
        assert model.work is not None
        # The formula counts the gradients of all weights.
        return model.work(example)._replace(flops=None)

    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(TrainableModel)}
    fields |= {"init": init, "loss": loss, "work": model.work and work, "apply": None}
    return FrozenModel(**fields, unfrozen=model, patterns=expressions)


def matched(paths: Sequence[str], expressions: Sequence[str], binding: str) -> set[str]:
    """The paths that match one of the expressions; UsageError if one matches none, or all do."""
    matched = {one: {x for x in paths if re.fullmatch(one, x)} for one in expressions}
    taken = set().union(*matched.values())
    idle = [one for one, found in matched.items() if not found]
    if idle or len(taken) == len(paths):
        what = f"the regular expression {idle[0]!r} matches none" if idle else "they match all"
        names = some_of(sorted(paths), 5)
        raise binding_error(binding, f" = {list(expressions)}: {what} of the parameters: {names}.")
    return taken


def with_frozen(params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """All parameters, the frozen ones among them, and the model state without these."""
    if not (frozen := frozen_of(model_state)):
        return params, model_state
    return joined(params, frozen), {k: x for k, x in model_state.items() if k != FROZEN}


def frozen_of(model_state: PyTree) -> PyTree:
    """The frozen parameters of a model state, nested dicts; {}: there are none."""
    return model_state.get(FROZEN, {}) if isinstance(model_state, Mapping) else {}


def plain_name(name: str) -> str:
    """The name of an array of the model state; that of a frozen parameter is its path."""
    return name.removeprefix(f"{MODEL_STATE}{FROZEN}/")


def with_values(model_state: PyTree, frozen: PyTree) -> PyTree:
    """A model state, its frozen parameters replaced by the given ones, if there are any."""
    return {**model_state, FROZEN: frozen} if frozen else model_state


def without_gradients(shardings: PyTree) -> PyTree:
    """`LeafSharding`s of frozen parameters."""
    return jax.tree.map(lambda p: dataclasses.replace(p, frozen=True), shardings)


def joined(first: PyTree, second: PyTree) -> PyTree:
    """Nested dicts in one."""
    return unflatten_dict(flatten_dict(first) | flatten_dict(second))


def named_variables(params: PyTree, model_state: PyTree) -> dict[str, Any]:
    """What can be given by name: parameters, frozen ones too, and the model state but its keys."""
    state = by_path(model_state).items()
    named = by_path(params) | {plain_name(MODEL_STATE + path): x for path, x in state}
    return {name: x for name, x in sorted(named.items()) if x.size and not is_key(x)}


def _with_frozen(frozen: PyTree, model_state: PyTree, binding: str) -> PyTree:
    if not isinstance(model_state, Mapping):
        if jax.tree.leaves(model_state):
            raise binding_error(binding, " needs a model whose state is a dict.")
        model_state = {}
    if FROZEN in model_state:
        raise binding_error(binding, f": the model has a state of the name {FROZEN!r}. Rename it.")
    return {FROZEN: frozen, **model_state}
