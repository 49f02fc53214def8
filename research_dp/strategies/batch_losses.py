"""Whether a model's loss, metrics and state are sums over examples, found when it is built.

A loss that mixes examples computes of a device's part of the batch something else than of the
batch. Its program is traced, in training and in evaluation, for a number of examples that no other
dim has, and read by the rules of `example_mixing`. Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from research_dp.distributed.batch_examples import seed_key, split_over
from research_dp.distributed.mesh import batch_devices, traced_for
from research_dp.distributed.sharding import path_name
from research_dp.distributed.units import Units
from research_dp.errors import binding_error, first_line
from research_dp.tracing.example_labels import SAME, SPOILT, Examples
from research_dp.tracing.example_mixing import ExampleRules
from research_dp.tracing.interpreter import interpret

if TYPE_CHECKING:
    from research_dp.strategies.strategy import Strategy

_PRIMES = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_UNDECIDED = "whether an example's numbers depend on others of the batch is not known"
_REASONS = {  # what a device must not give for its part of a batch, the clearest first
    "mixed": "combines ",
    "local": "is a function of a sum over a device's examples",
    "mean": "is a quotient of sums over a device's examples",
}


class Finding(NamedTuple):
    """Why an example's numbers depend on others, and whether that is sure.

    Its `kind` is 'mixed', 'drawn' (they depend on where random numbers are drawn) or 'unknown'.
    """

    kind: str
    message: str


def judged(strategy: Strategy) -> Strategy:
    """The strategy, with what is known of its loss; UsageError: it mixes examples."""
    spec, algorithm, found = strategy.spec, strategy.config.algorithm, judge_loss(strategy)
    accepted = spec.loss_over == "device"
    if found is None or found.kind != "mixed":
        if accepted and found is None and strategy.splits_batch:
            problem = " = 'device' has no effect: the loss is a sum over examples. Leave it out."
            raise binding_error(f"{spec.gin_name}.loss_over", problem)
        doubt = found and found.message
        return dataclasses.replace(strategy, algorithm=algorithm, doubt=doubt)
    if not accepted:
        raise binding_error(
            f"{spec.gin_name}.model",
            f": numbers of an example depend on others of the batch: {found.message}. "
            f"{strategy.name} gives a device a part of it.\n  Take research_dp.gather_examples or "
            f"global_mean; or accept it, by {spec.gin_name}.loss_over = 'device', if the loss of "
            "each device's part is meant (docs/batch_losses.md).",
        )
    sentence = f"the loss is that of each device's part of the batch ({found.message})"
    return dataclasses.replace(strategy, algorithm="; ".join(filter(None, (algorithm, sentence))))


def judge_loss(strategy: Strategy) -> Finding | None:
    """Finds how a loss, metric or state depends on other examples than through sums over them."""
    found = []
    for train in (True, False) if strategy.splits_batch else ():
        first = _judge(strategy, train, 0)
        if first and first.kind == "mixed":  # with other lengths too, so that it is no coincidence
            first = _judge(strategy, train, 1)
        found += [first] if first else []
    return min(found, key=lambda finding: SPOILT.index(finding.kind), default=None)


def _judge(strategy: Strategy, train: bool, number: int) -> Finding | None:
    """`judge_loss` in one mode, for the first or a further number of examples."""
    spec, state = strategy.spec, strategy.logical_state
    mode = "training" if train else "evaluation"
    leaves = jax.tree.leaves((state.params, state.model_state, dict(spec.example)))
    lengths = {length for x in leaves for length in x.shape if length}
    units = (p for p in _PRIMES if all(length % p for length in lengths))
    unit = next(itertools.islice(units, number, None), _PRIMES[number])
    rows = 2 * unit  # even, for models that halve a batch
    if number:  # and for those that cut it in chunks, if the device's own examples can be
        local = spec.batch_size // batch_devices(strategy.mesh) // spec.accumulation_steps
        rows = math.lcm(2, math.gcd(local, 48)) * unit
    try:
        program, results = trace_loss(strategy, rows, train=train)
        rules = ExampleRules(rows, unit, strategy.batch_axes)
        own = len(jax.tree.leaves((state.params, state.model_state)))
        arguments = [SAME] * own + [Examples("rows", 0)] * (len(program.in_avals) - own)
        labels = interpret(program, arguments, rules)
    except Exception as error:  # the model's own code may raise anything, and the run goes on
        reason = f"{type(error).__name__} for {rows} examples: {first_line(error)}"
        return Finding("unknown", f"{_UNDECIDED} ({mode}): {reason}")
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(results)]
    kinds = ["unknown" if x.kind == "local" and x.detail == "added" else x.kind for x in labels]
    found: dict[str, tuple[str, Examples]] = {}
    for kind, path, label in zip(kinds, paths, labels, strict=True):
        found.setdefault(kind, (path, label))  # the loss leads
    if "drawn" in found:
        local, micro = spec.batch_size // batch_devices(strategy.mesh), spec.accumulation_steps
        return Finding(
            "drawn",
            f"random numbers at {found['drawn'][1].where.partition(' at ')[2]} depend on how the "
            f"batch is split ({local // micro} of {spec.batch_size // micro} examples a device): "
            "a key serves several examples, or comes from its index on the device; draw for each "
            "example with its own key of `keys`",
        )
    for kind, reason in _REASONS.items():
        if kind in found:
            path, label = found[kind]
            return Finding("mixed", f"{path} in {mode}: {label.where} {reason}{label.detail}")
    for path, label in zip(paths, labels, strict=True):
        if path.startswith("state/") and label.kind == "sum":
            return Finding("mixed", f"{path} in {mode} is a sum over a device's examples")
    if "unknown" in found:
        path, label = found["unknown"]
        return Finding("unknown", f"{_UNDECIDED} ({path} in {mode}): {label.where}")
    return None


def trace_loss(
    strategy: Strategy, rows: int, *, train: bool = True, differentiated: bool = False
) -> tuple[Any, Any]:
    """The program of a device's loss of so many examples, or of its gradient, and its results."""
    spec, state = strategy.spec, strategy.logical_state
    batch = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in spec.example.items()}
    if not train:
        batch["mask"] = jax.ShapeDtypeStruct((rows,), np.float32)
    keys = jax.eval_shape(lambda: jax.random.split(seed_key(0), rows)) if train else None
    options: dict[str, Any] = {"train": train, "batch_axes": strategy.batch_axes}
    options |= {"units": Units()} if spec.model.units else {}

    def loss(params: Any, model_state: Any, batch: Any, keys: Any) -> Any:
        with split_over(strategy.batch_axes, strategy.config.reduction), traced_for(None):
            out = spec.model.loss(params, model_state, batch, keys, **options)
        if differentiated:
            return out.total
        parts = {"loss": out.total, "weight": out.weight, "metric": dict(out.sums)}
        return {**parts, "state": out.model_state}

    traced = jax.grad(loss) if differentiated else loss
    make = jax.make_jaxpr(traced, axis_env=[*strategy.mesh.shape.items()], return_shape=True)
    return make(state.params, state.model_state, batch, keys)
