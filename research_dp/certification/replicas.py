"""Certifies replicas that train by themselves: each step, each meeting, checkpoints in a round.

One replica is certified as any strategy is. Then each replica's step is compared with that of one
by itself, and each meeting with one on the host.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.certification.certificate import Certificate
from research_dp.certification.diagnose import SHOWN
from research_dp.certification.harness import POSITIONS, Batch, Bench, run_step, saved, to_host
from research_dp.certification.noise import train_batches
from research_dp.certification.tolerances import first_difference
from research_dp.console import Report
from research_dp.distributed.buckets import Encoded
from research_dp.distributed.mesh import DATA_AXIS, build_mesh, sizes_text
from research_dp.distributed.sharding import by_path
from research_dp.errors import some_of
from research_dp.strategies import PlacedBatch, Strategy, TrainState
from research_dp.strategies.jaxpr_collectives import collectives, of_step
from research_dp.strategies.outer import one_of
from research_dp.types import DataSet

EVERY = 2  # steps of the rounds that are tried, for each fragment
_NEAR, _NEAR_NARROW = 1e-3, 3e-2  # of a change; where differences are averaged in two bytes
PyTree = Any
# What is compared of a step; and what is wrong where it fails.
_KINDS: dict[str, Callable[[TrainState], PyTree]] = {
    "replica's parameters": lambda state: state.slots["outer"]["replicas"]["params"],
    "replica's optimizer state": lambda state: state.opt_state,
    "anchor": lambda state: state.params,
    "outer state": lambda state: state.slots["outer"]["state"],
}
_CAUSES = {
    "sent inside a round": "a step waits for other replicas: a slot names axis 'data' by itself",
    "replica's parameters": "a replica takes other rows than its own, or another step than alone",
    "replica's optimizer state": "states of optimizers change where replicas meet",
    "anchor": "replicas meet otherwise than data_parallel.outer says",
    "outer state": "replicas meet otherwise than data_parallel.outer says",
    "anchor after two rounds": "a fragment is never sent, or never received",
    "direction": "data_parallel.outer moves the anchor away from replicas: a wrong sign",
}
_LOST = "a checkpoint lacks a part of what a round goes on from"


def one_replica(bench: Bench) -> Bench:
    """The bench of the first replica by itself."""
    mesh = bench.config.mesh
    of_first = build_mesh({**mesh.shape, DATA_AXIS: 1}, list(mesh.devices[0].flat))
    rows = bench.spec.batch_size // mesh.shape[DATA_AXIS]
    return dataclasses.replace(
        bench,
        config=dataclasses.replace(bench.config, outer=None, mesh=of_first),
        spec=dataclasses.replace(bench.spec, batch_size=rows),
    )


def check_rounds(certificate: Certificate, bench: Bench, data: DataSet, report: Report) -> None:
    """Adds checks of some short rounds to the certificate of one replica."""
    outer, alone = _short(bench.config.outer), one_replica(bench)
    config = dataclasses.replace(bench.config, outer=outer)
    strategy, one = config.build(bench.spec), alone.config.build(alone.spec)
    certificate.algorithm = strategy.algorithm
    sizes = sizes_text(strategy.mesh.shape)
    certificate.title = (
        f"{strategy.name} on {sizes} in rounds of {outer.every} steps; {certificate.title}"
    )
    sent = collectives(strategy.train_step, strategy.abstract_state, strategy.abstract_batch)
    across = sorted({c.kind for c in sent if DATA_AXIS in c.axes})
    message = f"{', '.join(across) or 'nothing'} over {DATA_AXIS!r} in the program of a step"
    certificate.check("sent inside a round", not across, message)
    met = {c.dtype for c in of_step(strategy) if DATA_AXIS in c.axes}
    near, steps = _NEAR if met <= {"float32"} else _NEAR_NARROW, 2 * outer.every + 1
    batches = list(train_batches(bench, data, steps + 2))
    first = state = strategy.logical(to_host(bench.first_state(strategy)))
    for number in range(steps):
        report("Comparing rounds", f"step {number + 1} of {steps}")
        new = run_step(strategy, state, batches[number]).state
        expected, learnt = _by_hand(strategy, one, state, batches[number], new)
        for kind, moved in _KINDS.items():
            apart, leaf = _apart(*(moved(x) for x in (state, new, expected)))
            where = f"{apart:.1e} of its change apart at {leaf}"
            certificate.check(f"{kind}, step {number}", apart <= near, where)
        if number + 1 == outer.every and outer.events(outer.every).meet == 0:
            moved = jax.tree.map(np.subtract, new.params, state.params)
            along = sum(
                np.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (moved, learnt)), strict=True)
            )
            certificate.check("direction", bool(along > 0), "the anchor moves as replicas did")
        if not certificate.is_right:
            failed = [c.name for c in certificate.checks if c.passed is False]
            # Replicas that meet at a wrong anchor go on from it.
            name = next((name for name in failed if name.startswith("anchor")), failed[0])
            certificate.cause = _CAUSES[name.partition(",")[0]]
            return
        state = new
    of_outer = state.slots["outer"]["state"]
    lost = of_outer.get("lost", {}) if isinstance(of_outer, Mapping) else {}
    still = _unmoved(strategy, first.params, state.params, lost)
    message = f"each parameter has moved{', or a part of it waits' if lost else ''}"
    message = f"never moved: {some_of(still, SHOWN)}" if still else message
    certificate.check("anchor after two rounds", not still, message)
    if still:
        certificate.cause = _CAUSES["anchor after two rounds"]
        return
    report("Comparing checkpoints")
    _check_round_trips(certificate, bench, strategy, state, batches[steps:])


def _short(outer: Any) -> Any:
    """The outer step with short rounds, of at most two fragments."""
    outer = copy.copy(outer)
    outer.every = EVERY
    if hasattr(outer, "fragments"):
        outer.fragments, outer.delay = min(outer.fragments, 2), min(outer.delay, EVERY)
        outer.every *= outer.fragments
    return outer


def _unmoved(
    strategy: Strategy, before: PyTree, after: PyTree, lost: Mapping[str, Any]
) -> list[str]:
    """Parameters, or layers of stacks, that are as they were, but those of which a part waits.

    `lost` has arrays (replicas, ...) of each fragment, which has of a stack each so manieth layer.
    """
    found, old, new = [], by_path(before), by_path(after)
    waiting = {
        (path, number + len(lost) * i)
        for number, part in enumerate(lost.values())
        for path, x in part.items()
        for i in np.flatnonzero(np.asarray(x).any((0, *range(2, x.ndim))))
    }
    for p in jax.tree.leaves(strategy.shardings.params):
        same = np.asarray(old[p.path]) == np.asarray(new[p.path])
        if p.stacked:
            layers = np.flatnonzero(same.reshape(len(same), -1).all(1))
            still = [layer for layer in layers if (p.path, layer) not in waiting]
            found += [f"{p.path}, layer {layer}" for layer in still]
        elif same.all() and p.path not in {path for path, _ in waiting}:
            found.append(p.path)
    return found


def _by_hand(
    strategy: Strategy, one: Strategy, state: TrainState, batch: Batch, found: TrainState
) -> tuple[TrainState, PyTree]:
    """(the state after a step, of one replica after the other; what replicas learnt on average).

    What encoding loses is taken from `found`, the state after the strategy's step: the mean that
    replicas receive and the mean of what they lose are together the mean of what they sent.
    """
    replicas, micros = strategy.mesh.shape[DATA_AXIS], strategy.spec.accumulation_steps
    rows = np.arange(strategy.spec.batch_size).reshape(micros, replicas, -1)
    ends, slot = [], state.slots["outer"]
    for number in range(replicas):
        own = rows[:, number].reshape(-1)
        given = {name: x[own] for name, x in batch.items()} | {POSITIONS: own.astype(np.int32)}
        examples = dict(one.place_batch(given).examples)
        placed = PlacedBatch(examples, examples.pop(POSITIONS))
        ends.append(run_step(one, one_of(state, number), placed).state)
    joined: Any = jax.tree.map(lambda *x: jnp.stack(x), *(end._replace(slots=()) for end in ends))
    params, model_state = joined.params, slot["replicas"]["model_state"]
    learnt = jax.tree.map(lambda a, x: np.asarray(x).mean(0) - a, state.params, params)
    anchor, outer_state = jax.tree.map(jnp.asarray, (state.params, slot["state"]))
    outer: Any = strategy.config.outer

    step = ends[0].step
    events, options = outer.events(int(step)), {"stored": strategy.shardings.params}

    def mean(tree: PyTree, dtype: Any = None, codec: Any = None) -> PyTree:
        means = jax.tree.map(lambda x: jnp.mean(x, 0), tree)
        if codec is None:
            return means
        number = events.meet if events.send is None else events.send
        lost = found.slots["outer"]["state"]["lost"][str(number)]
        received = {path: x - lost[path].mean(0) for path, x in means.items()}
        for path, x in received.items():  # what nobody sent is not 0 but for rounding
            is_sent = jnp.abs(x) > 1e-4 * jnp.abs(means[path])
            received[path] = Encoded(jnp.where(is_sent, x, 0), lost[path])
        return received

    before = jax.tree.map(jnp.asarray, slot["replicas"]["params"])
    for number, each in ((events.send, before), (events.meet, params)):
        if number is not None:
            outer_state = outer.send(anchor, each, outer_state, number, mean=mean, **options)
    for number in (events.receive, events.meet):
        if number is not None:
            arrived = anchor, params, outer_state, number
            anchor, params, outer_state = outer.receive(*arrived, **options)
    replica = {"params": params, "model_state": model_state}
    new = state._replace(step=step, params=anchor, opt_state=joined.opt_state)
    new = new._replace(slots={"outer": {"replicas": replica, "state": outer_state}})
    return to_host(new), learnt


def _apart(old: PyTree, found: PyTree, expected: PyTree) -> tuple[float, str]:
    """How far two trees are apart, as a part of the change of an array; and of which."""
    worst: tuple[float, str] = (0.0, "any array")
    before, after = by_path(old), by_path(found)
    for path, given in by_path(expected).items():
        x, y, z = (np.asarray(a, np.float64) for a in (before[path], after[path], given))
        change = np.linalg.norm(z - x) + 1e-6 * np.linalg.norm(z) + 1e-30
        worst = max(worst, (float(np.linalg.norm(y - z) / change), path))
    return worst


def _check_round_trips(
    certificate: Certificate,
    bench: Bench,
    strategy: Strategy,
    state: TrainState,
    batches: Sequence[Batch],
) -> None:
    """Checks a state that is saved inside a round: restored, continued, by other replicas."""
    with saved(bench, strategy, state) as restore:
        ends = [restore(strategy), state]
        certificate.check_bits("saved and restored", first_difference(*ends))
        for batch in batches:
            ends = [run_step(strategy, end, batch).state for end in ends]
        name = f"{len(batches)} steps after it"
        certificate.check_bits(name, first_difference(*ends))
        replicas = strategy.mesh.shape[DATA_AXIS] // 2
        if replicas:
            mesh = build_mesh(
                {**strategy.mesh.shape, DATA_AXIS: replicas},
                list(strategy.mesh.devices[:replicas].flat),
            )
            other = dataclasses.replace(strategy.config, mesh=mesh).build(bench.spec)
            moved = restore(other)
            certificate.check_bits(
                f"anchor, moved to {replicas} replicas",
                first_difference(moved.params, state.params),
            )
            each = moved.slots["outer"]["replicas"]["params"]
            begun = jax.tree.map(lambda a: np.stack([a] * replicas), moved.params)
            certificate.check_bits("replicas of a new round", first_difference(each, begun))
    if not certificate.is_right:
        certificate.cause = _LOST
