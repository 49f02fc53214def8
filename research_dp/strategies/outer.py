"""Replicas that differ on purpose: each trains by itself, and every few steps they meet.

Local SGD (Stich, 2018, arXiv 1805.09767), DiLoCo (Douillard et al., 2023, arXiv 2311.08105). A
replica is the devices of one place along mesh axis `data`. Its parameters, and the states of its
model and optimizer, are an entry of arrays that have a leading dim, sharded over that axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import (
    BelowOne,
    Count,
    CountOrZero,
    Dtype,
    Fraction,
    Positive,
    Transform,
)
from research_dp.distributed import buckets
from research_dp.distributed.buckets import Encoded, is_encoded
from research_dp.distributed.codecs import Codec
from research_dp.distributed.collectives import Wire, cast_dtype
from research_dp.distributed.mesh import BATCH_AXES, DATA_AXIS
from research_dp.distributed.optimizer import map_state
from research_dp.distributed.sharding import LeafSharding, by_path, fitted, fitted_tree
from research_dp.errors import binding_error
from research_dp.strategies import slots, strategy
from research_dp.strategies.frozen import FROZEN, frozen_of, with_values
from research_dp.strategies.step import Gradients, Step
from research_dp.strategies.strategy import PlacedBatch, TrainState, fitted_state
from research_dp.types import PyTree


@gin.register("outer", module="strategies")
class Outer:
    """Replicas go on from an anchor, which an optimizer moves by what they have learnt.

    With `fragments` they meet in parts (streaming DiLoCo, Douillard et al., 2025, arXiv
    2501.18512): of each stack every so manieth layer, and some of the other parameters. With a
    `delay` a fragment is averaged as it was at the start of a step, in the program of that step.

    Args:
        every: Number of steps from one meeting of a fragment to its next.
        optimizer: A transform of Optax, with a state for each fragment. Its gradient is the anchor
            minus the mean of the replicas: `@average()`, `@nesterov_outer()`.
        dtype: In which these differences are averaged; None: their own.
        fragments: Their number; they meet one after the other, evenly over a round.
        delay: Steps until a fragment is received; 0: replicas wait for it after a step.
        mixing: The share of a replica's own parameters in those that it goes on with.
        codec: What encodes these differences, e.g. `@top_k()`; they are averaged as gradients are
            by `compression.sync`. What a replica loses, it adds to its next difference.
        error_decay: The share of what was lost that is added (SparseLoCo: 0.95, arXiv 2508.15706).

    Raises:
        UsageError: A fragment would be sent before the last one is received; or a codec draws.
    """

    @checked
    def __init__(
        self,
        every: Count,
        optimizer: Transform,
        dtype: Dtype | None = None,
        fragments: Count = 1,
        delay: CountOrZero = 0,
        mixing: BelowOne = 0.0,
        codec: Codec | None = None,
        error_decay: Fraction = 1.0,
    ):
        if codec and (dtype or codec.rounding != "nearest"):
            why = "with outer.dtype: bind one" if dtype else "draws: it has to round to the nearest"
            raise binding_error("outer.codec", f" = @{codec.name}() {why}.")
        if max(delay, 1) > every // fragments:
            often = every / fragments
            problem = f"every = {every}: a fragment of {fragments} each {often:g} steps"
            raise binding_error(
                "outer.delay", f" = {delay}, {problem}. Give fewer, or a longer round."
            )
        if error_decay != 1 and not codec:
            raise binding_error("outer.error_decay", f" = {error_decay}, and outer.codec is None.")
        self.every, self.fragments, self.delay = every, fragments, delay
        self._optimizer, self._mixing, self._dtype = optimizer, mixing, dtype
        self._codec, self._decay = codec, error_decay
        parts = f", in {fragments} fragments" if fragments > 1 else ""
        parts += f", by differences in {codec.name}" if codec else ""
        self.algorithm = f"replicas train by themselves, and meet every {every} steps{parts}"

    def events(self, done: int) -> slots.Events:
        """See `slots.OuterStep`."""
        starts = [(number + 1) * self.every // self.fragments for number in range(self.fragments)]

        def at(steps: int) -> int | None:
            due = [i for i, n in enumerate(starts) if steps >= n and (steps - n) % self.every == 0]
            return due[0] if due else None

        if not self.delay:
            return slots.Events(meet=at(done))
        return slots.Events(at(done - 1), at(done - self.delay))

    def init(self, anchor: PyTree, *, stored: PyTree, replicas: int) -> PyTree:
        """States of the optimizer and what is lost by fragment; room for one that is under way."""
        parts = [self._part(anchor, stored, number) for number in range(self.fragments)]
        room: dict[str, jax.Array] = {}
        for path, x in (item for part in parts for item in part.items() if self.delay):
            room[path] = max(room.get(path, x), x, key=lambda x: x.shape)
        if not all(parts):
            problem = f" = {self.fragments}: one of them has no parameters. Give fewer."
            raise binding_error("outer.fragments", problem)
        optimizer = {str(i): self._optimizer.init(part) for i, part in enumerate(parts)}
        # By its shape a checkpoint tells rounds apart: what is under way arrives in no others.
        rounds = jnp.zeros((1, self.fragments, *([self.delay, self.every] if self.delay else [])))
        sent = jax.tree.map(jnp.zeros_like, room)
        state = {"optimizer": optimizer, "sent": sent, "fragments_delay_every": rounds}
        if not self._codec:
            return state

        def nothing(x: jax.Array) -> jax.Array:
            return jnp.zeros((replicas, *x.shape), jnp.float32)

        return state | {"lost": {str(i): jax.tree.map(nothing, x) for i, x in enumerate(parts)}}

    def send(
        self,
        anchor: PyTree,
        replicas: PyTree,
        state: PyTree,
        number: int,
        *,
        stored: PyTree,
        mean: slots.Mean,
    ) -> PyTree:
        """New state: with the mean of what replicas have learnt of a fragment."""
        own, each = self._part(anchor, stored, number), self._part(replicas, stored, number, 1)
        each, new = {path: own[path][None] - x for path, x in each.items()}, dict(state)
        if not self._codec:
            learnt = mean(each, self._dtype)
        else:
            lost = state["lost"][str(number)]
            each = {path: x + self._decay * lost[path] for path, x in each.items()}
            encoded = mean(each, codec=self._codec)
            learnt = {path: x.mean.astype(own[path].dtype) for path, x in encoded.items()}
            lost = {path: x.lost for path, x in encoded.items()}
            new["lost"] = {**state["lost"], str(number): lost}
        room = state["sent"]
        sent = {path: fitted(x, room.get(path, x).shape) for path, x in learnt.items()}
        return {**new, "sent": {**room, **sent}}

    def receive(
        self, anchor: PyTree, replicas: PyTree, state: PyTree, number: int, *, stored: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """(anchor, replicas, state) with the fragment that was sent last."""
        own, each = self._part(anchor, stored, number), self._part(replicas, stored, number, 1)
        learnt = {path: fitted(state["sent"][path], x.shape) for path, x in own.items()}
        updates, new = self._optimizer.update(learnt, state["optimizer"][str(number)], own)
        own = optax.apply_updates(own, updates)
        a = self._mixing
        each = {
            path: a * x + (1 - a) * own[path][None] if a else jnp.broadcast_to(own[path], x.shape)
            for path, x in each.items()
        }
        anchor = self._joined(anchor, own, stored, number)
        replicas = self._joined(replicas, each, stored, number, 1)
        optimizer, sent = {**state["optimizer"], str(number): new}, state["sent"]
        sent = sent if self.delay else {}
        return anchor, replicas, {**state, "optimizer": optimizer, "sent": sent}

    def wire_bytes(self, shape: tuple[int, ...], dtype: Any) -> float:
        """Bytes that are all-reduced of an array of the shape that a device has."""
        if self._codec:
            return math.prod(shape) * self._codec.nbytes(self._codec.block) / self._codec.block
        return math.prod(shape) * jnp.dtype(cast_dtype(dtype, self._dtype)).itemsize

    def _of_others(self, stored: PyTree) -> dict[str, int]:
        """The fragment of each parameter that is no stack: the largest first, evenly by size."""
        leaves, sizes = jax.tree.leaves(stored), [0] * self.fragments
        for p in leaves:
            for layer in range(p.shape[0] if p.stacked else 0):
                sizes[layer % self.fragments] += p.nbytes // p.shape[0]
        found = {}
        for p in sorted((p for p in leaves if not p.stacked), key=lambda p: (-p.nbytes, p.path)):
            found[p.path] = number = sizes.index(min(sizes))
            sizes[number] += p.nbytes
        return found

    def _part(self, tree: PyTree, stored: PyTree, number: int, lead: int = 0) -> dict[str, Any]:
        """The arrays of a fragment by path; of stacks its layers. `lead` dims come before."""
        others, part, arrays = self._of_others(stored), {}, jax.tree.leaves(tree)
        for p, x in zip(jax.tree.leaves(stored), arrays, strict=True):
            if not p.stacked and others[p.path] == number:
                part[p.path] = x
            elif p.stacked and number < p.shape[0]:
                part[p.path] = x[(*(slice(None),) * lead, slice(number, None, self.fragments))]
        return part

    def _joined(
        self, tree: PyTree, part: Mapping[str, Any], stored: PyTree, number: int, lead: int = 0
    ) -> PyTree:
        """The tree with a fragment's arrays in their places."""

        def one(p: LeafSharding, x: jax.Array) -> jax.Array:
            if p.path not in part or not p.stacked:
                return part.get(p.path, x)
            of_part, layers = part[p.path], x.shape[lead]
            if of_part.shape == x.shape:
                return of_part
            # No scatter, which the compiler of sharded arrays might gather for.
            end = layers - 1 - number - (of_part.shape[lead] - 1) * self.fragments
            dims = [(0, 0, 0)] * x.ndim
            dims[lead] = (number, end, self.fragments - 1)
            spread = lax.pad(of_part, jnp.zeros((), x.dtype), dims)
            is_own = lax.broadcasted_iota(jnp.int32, x.shape, lead) % self.fragments == number
            return jnp.where(is_own, spread, x)

        return jax.tree.map(one, stored, tree)


@gin.register(module="strategies")
def average() -> optax.GradientTransformation:
    """The anchor becomes the mean of the replicas: local SGD."""
    return optax.sgd(1.0)


@gin.register(module="strategies")
@checked
def nesterov_outer(rate: Positive = 0.7, momentum: BelowOne = 0.9) -> optax.GradientTransformation:
    """SGD with Nesterov momentum, as DiLoCo has it (Douillard et al., 2023, arXiv 2311.08105).

    Args:
        rate: Learning rate. The best one grows with the number of replicas: 0.4 for 2, 0.8 for 8
            (Charles et al., 2025, arXiv 2503.09799).
        momentum: Of the means.
    """
    return optax.sgd(rate, momentum, nesterov=True)


class Replicas:
    """The state and the steps of replicas, given those of one.

    The state's parameters are the anchor. Slot state `outer` has 'replicas', their parameters and
    model state but frozen parameters, which all share, and 'state', that of the outer step.
    """

    def __init__(
        self, config: strategy.StrategyConfig, step: Step, stored: TrainState, logical: TrainState
    ):
        self._outer: Any = config.outer
        self._options = {"stored": step.shardings.params}
        self._mesh, self._wire, self._step = config.mesh, Wire(config.reduction), step
        # Of one replica.
        self._stored, self._logical = (
            x._replace(model_state=_trained(x.model_state)) for x in (stored, logical)
        )
        self.stored, self.logical = self._abstract(stored), self._abstract(logical)

    def _joined(self, one: TrainState, each: Callable[[Any], Any], state: PyTree) -> TrainState:
        """The state of all replicas: `each` makes the arrays of all from those of one."""
        of_each = functools.partial(jax.tree.map, each)
        replicas = {"params": one.params, "model_state": _trained(one.model_state)}
        slot = {"replicas": of_each(replicas), "state": state}
        opt_state, loss_scale = of_each((one.opt_state, one.loss_scale))
        return one._replace(opt_state=opt_state, loss_scale=loss_scale, slots={"outer": slot})

    def initial(self, one: TrainState) -> TrainState:
        """All replicas as the given one, which is the anchor."""
        count = self._mesh.shape[DATA_AXIS]
        return self._joined(
            one,
            lambda x: jnp.broadcast_to(x[None], (count, *x.shape)),
            self._outer.init(one.params, **self._options, replicas=count),
        )

    def _abstract(self, one: TrainState) -> TrainState:
        """As `initial`, of abstract arrays with shardings."""
        count, params = self._mesh.shape[DATA_AXIS], by_path(one.params)
        everywhere = NamedSharding(self._mesh, PartitionSpec())

        def each(x: Any) -> Any:
            sharding = NamedSharding(x.sharding.mesh, PartitionSpec(DATA_AXIS, *x.sharding.spec))
            return x.update(shape=(count, *x.shape), sharding=sharding)

        def as_param(x: Any, p: LeafSharding) -> Any:
            like = params[p.path]  # of a stack maybe some layers
            lead = x.shape[: x.ndim - like.ndim]  # of each replica
            is_like = x.shape[len(lead) + p.stacked :] == like.shape[p.stacked :]
            if x.ndim < like.ndim or not is_like or lead not in ((), (count,)):
                return x.update(sharding=everywhere)
            spec = PartitionSpec(*[DATA_AXIS] * len(lead), *like.sharding.spec)
            return x.update(sharding=NamedSharding(self._mesh, spec))

        init = functools.partial(self._outer.init, **self._options, replicas=count)
        state = jax.eval_shape(init, one.params)
        on_all = functools.partial(jax.ShapeDtypeStruct.update, sharding=everywhere)
        state = map_state(as_param, state, self._step.shardings.params, on_all)
        return self._joined(one, each, state)

    def train(
        self,
        state: TrainState,
        batch: PlacedBatch,
        send: int | None = None,
        receive: int | None = None,
    ) -> tuple[TrainState, PyTree]:
        """A step of each replica: the new state, and metrics (replicas, 2).

        Nothing is sent but a fragment as it was before the step, if an outer step streams.
        """
        before = _of_each(state)
        frozen = frozen_of(state.model_state)
        seen = before._replace(opt_state=())
        specs = jax.tree.map(
            lambda x: x.sharding.spec, _of_each(self.stored)._replace(opt_state=())
        )
        of_grads = jax.tree.map(
            lambda p: PartitionSpec(DATA_AXIS, *p.spec), self._step.shardings.slices
        )
        of_frozen = jax.tree.map(lambda p: p.spec, self._step.shardings.frozen)
        each: Any = PartitionSpec(DATA_AXIS)
        given = Gradients(of_grads, *(each,) * 4, specs.model_state, each)
        gradients: Any = jax.shard_map(
            self._gradients,
            mesh=self._mesh,
            in_specs=(specs, of_frozen, PartitionSpec(None, BATCH_AXES)),
            out_specs=given,
            check_vma=False,
        )
        axes: Any = TrainState(None, *(0,) * 5)
        update = jax.vmap(self._update, (axes, 0), (axes, 0), spmd_axis_name=DATA_AXIS)
        new, metrics = update(before, gradients(seen, frozen, batch))
        # Means over replicas of means over a step.
        metrics["grad_norm"] /= self._mesh.shape[DATA_AXIS]
        replicas = {"params": new.params, "model_state": new.model_state}
        slot = {**state.slots["outer"], "replicas": replicas}
        changed = {
            "opt_state": new.opt_state,
            "loss_scale": new.loss_scale,
            "slots": {"outer": slot},
        }
        after = state._replace(step=new.step, **changed)
        if send is not None:
            # Of the state before the step, so that nothing of the step waits for it.
            after.slots["outer"]["state"], of_round = self._sent(state, send)
            count = self._mesh.shape[DATA_AXIS]
            for name, x in of_round.items():
                metrics[name] = jnp.broadcast_to(x[None], (count, *x.shape))
        if receive is not None:
            slot = after.slots["outer"]
            arrived = state.params, slot["replicas"]["params"], slot["state"]
            after = self._met(after, *self._outer.receive(*arrived, receive, **self._options))
        return after, metrics

    def _gradients(self, state: TrainState, frozen: PyTree, batch: PlacedBatch) -> Gradients:
        """The gradients of one replica, inside the map; arrays have a leading dim of length 1."""
        one = jax.tree.map(lambda x: x[0], state._replace(step=state.step[None]))
        one = one._replace(model_state=with_values(one.model_state, frozen))
        given = self._step.gradients(one, batch)
        given = given._replace(model_state=_trained(given.model_state))
        return jax.tree.map(lambda x: x[None], given)

    def _update(self, one: TrainState, given: Gradients) -> tuple[TrainState, PyTree]:
        """The update of one replica, of global arrays."""
        given = given._replace(grads=fitted_tree(given.grads, self._logical.params))
        new, metrics = self._step.update(fitted_state(one, self._logical), given)
        return fitted_state(new, self._stored), metrics

    def meet(self, state: TrainState, number: int) -> tuple[TrainState, PyTree]:
        """What follows a step after which a fragment meets: the new state, and metrics (2,)."""
        own, (slot_state, metrics) = _of_each(state).params, self._sent(state, number)
        met = self._outer.receive(state.params, own, slot_state, number, **self._options)
        return self._met(state, *met), metrics

    def _sent(self, state: TrainState, number: int) -> tuple[PyTree, dict[str, jax.Array]]:
        """(state of the outer step with what is sent of a state, what to report)."""
        metrics, slot = dict[str, jax.Array](), state.slots["outer"]
        mean = functools.partial(self._mean_of_params, metrics=metrics)
        given = state.params, slot["replicas"]["params"], slot["state"], number
        return self._outer.send(*given, mean=mean, **self._options), metrics

    def _met(self, state: TrainState, anchor: PyTree, params: PyTree, slot_state: PyTree) -> Any:
        """The state after replicas met, whose statistics are averaged too."""
        own = state.slots["outer"]["replicas"]
        old = state.params, own["params"], state.slots["outer"]["state"]
        new = anchor, params, slot_state
        slots.check_state("data_parallel.outer", new, old, "its function returned")
        shared, each = self._meet_states(state.model_state, own["model_state"])
        slot = {"replicas": {"params": params, "model_state": each}, "state": slot_state}
        return state._replace(params=anchor, model_state=shared, slots={"outer": slot})

    def _mean_of_params(
        self,
        tree: PyTree,
        dtype: Any = None,
        codec: Codec | None = None,
        *,
        metrics: dict[str, jax.Array],
    ) -> PyTree:
        """The mean over replicas of arrays by the paths of parameters; and what to report."""
        specs = {p.path: p.spec for p in jax.tree.leaves(self._step.shardings.params)}
        specs = {path: specs[path] for path in tree}
        means = self._mean(tree, specs, dtype, codec)
        if not metrics:
            received = [x.mean for x in means.values()] if codec else means
            learnt = optax.tree.norm(received, squared=True)
            each = optax.tree.norm(tree, squared=True) / self._mesh.shape[DATA_AXIS]
            for name, x in (("learnt", learnt), ("distance", jnp.maximum(each - learnt, 0))):
                pair = jnp.stack([jnp.sqrt(x.astype(jnp.float32)), jnp.ones((), jnp.float32)])
                metrics[f"{strategy.OF_OUTER}{name}"] = pair
        return means

    def _meet_states(self, shared: PyTree, each: PyTree) -> tuple[PyTree, PyTree]:
        """The anchor's model state and that of all replicas: statistics are averaged."""
        flat: Any = jax.tree.flatten(each)
        leaves, tree = flat
        frozen = frozen_of(shared)
        found = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        means = self._mean([leaves[i] for i in found], [PartitionSpec()] * len(found))
        old = [x[0] for x in leaves]  # of what has no mean, the first replica's
        for i, mean in zip(found, means, strict=True):
            old[i], leaves[i] = mean, jnp.broadcast_to(mean[None], leaves[i].shape)
        state = tree.unflatten(old)
        return with_values(state, frozen), tree.unflatten(leaves)

    def _mean(
        self, tree: PyTree, specs: PyTree, dtype: Any = None, codec: Codec | None = None
    ) -> PyTree:
        """Arrays (replicas, ...), whose entries are sharded by `specs` -> their mean.

        With a codec an `Encoded` of each, with what encoding loses of each replica's.
        """
        wire = dataclasses.replace(self._wire, dtype=dtype, codec=codec, feedback=bool(codec))

        def one(tree: PyTree) -> PyTree:
            means = buckets.mean_tree(jax.tree.map(lambda x: x[0], tree), (DATA_AXIS,), wire)
            if not codec:
                return means
            return jax.tree.map(lambda x: x._replace(lost=x.lost[None]), means, is_leaf=is_encoded)

        given = jax.tree.map(lambda spec: PartitionSpec(DATA_AXIS, *spec), specs)
        out = jax.tree.map(Encoded, specs, given) if codec else specs
        on_mesh: Any = jax.shard_map(
            one, mesh=self._mesh, in_specs=(given,), out_specs=out, check_vma=False
        )
        return on_mesh(tree)


def of_new_round(state: TrainState, like: TrainState) -> TrainState:
    """The state of other replicas, for as many as `like` has: a new round begins at the anchor.

    States of optimizers, and what was lost, are means over replicas; integers those of the first.
    """

    def one(x: jax.Array, to: Any) -> jax.Array:
        first = jnp.mean(x, 0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]
        return jnp.broadcast_to(fitted(first, to.shape[1:])[None], to.shape)

    def begun(state: TrainState) -> TrainState:
        slot, slot_like = state.slots["outer"], like.slots["outer"]
        anchor = {"params": state.params, "model_state": _trained(state.model_state)}
        replicas = jax.tree.map(
            lambda x, to: jnp.broadcast_to(x[None], to.shape), anchor, slot_like["replicas"]
        )
        kept = jax.tree.map(
            lambda x, to: x if x.shape == to.shape else one(x, to),
            slot["state"],
            slot_like["state"],
        )
        slots = {"outer": {"replicas": replicas, "state": kept}}
        parts = (state.opt_state, state.loss_scale), (like.opt_state, like.loss_scale)
        opt_state, loss_scale = jax.tree.map(one, *parts)
        return state._replace(opt_state=opt_state, loss_scale=loss_scale, slots=slots)

    return jax.jit(begun, out_shardings=jax.tree.map(lambda x: x.sharding, like))(state)


def one_of(state: TrainState, number: int) -> TrainState:
    """The state of one replica by itself."""
    each = _of_each(state)
    one = TrainState(*(jax.tree.map(lambda x: x[number], tree) for tree in each._replace(step=())))
    model_state = with_values(one.model_state, frozen_of(state.model_state))
    return one._replace(step=state.step, model_state=model_state)


def _of_each(state: TrainState) -> TrainState:
    """The state of replicas in place of the anchor's; arrays have a leading dim."""
    own = state.slots["outer"]["replicas"]
    return state._replace(params=own["params"], model_state=own["model_state"], slots=())


def _trained(model_state: PyTree) -> PyTree:
    """A model state without frozen parameters."""
    if not frozen_of(model_state):
        return model_state
    return {name: x for name, x in model_state.items() if name != FROZEN}
