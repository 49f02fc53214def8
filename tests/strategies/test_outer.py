"""Replicas that train by themselves, and meet every few steps."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from research_dp import UsageError
from research_dp.analysis.program_cost import collectives_of
from research_dp.analysis.topologies import topology
from research_dp.certification import harness
from research_dp.certification.certificate import Certificate
from research_dp.certification.certify import certify
from research_dp.certification.replicas import check_rounds
from research_dp.console import silent
from research_dp.distributed.batch_examples import global_mean
from research_dp.distributed.mesh import build_mesh
from research_dp.distributed.sharding import by_path
from research_dp.errors import RunFailure
from research_dp.planning.estimate import compile_row, compile_step
from research_dp.planning.row import Row
from research_dp.runs import checkpoint
from research_dp.runs.checkpoint import Checkpoints
from research_dp.runs.manifest import Progress
from research_dp.strategies.frozen import frozen_of
from research_dp.strategies.jaxpr_collectives import collectives, of_step
from research_dp.strategies.outer import Outer, Replicas
from research_dp.strategies.slots import Events
from research_dp.strategies.state import BatchLayout
from research_dp.strategies.strategy import NO_WEIGHT
from research_dp.training.nonfinite import NonfiniteCheck
from research_dp.training.optimizers import LearningRate
from research_dp.types import LossOutput, TrainableModel
from tests.support import decoder
from tests.support.certified import BATCH, MAX_NORM, batches, bench_of, noise, small_model, spec_of
from tests.support.marks import exhaustive, slow
from tests.support.recipes import recipe

MODEL = small_model()


def configured(count, *bindings, stem="fsdp", every=1, optimizer="@average()"):
    """Some replicas of a strategy, on all devices."""
    return recipe(
        stem,
        "data_parallel.outer = @outer()",
        f"outer.every = {every}",
        f"outer.optimizer = {optimizer}",
        f"make_mesh.axes = {{'data': {count}, 'fsdp': -1}}",
        *bindings,
    )


def of_replicas(count, *bindings, **options):
    """The same, built with SGD."""
    return configured(count, *bindings, **options).build(spec_of(MODEL, optimizer=optax.sgd(0.1)))


def trained(strategy, steps=4):
    """The state after some steps, on the host, and the metrics of each."""
    state, metrics = strategy.init(jax.random.key(0)), []
    for batch in batches(strategy.spec.batch_size, steps):
        state, sums = harness.take_step(strategy, state, batch)
        metrics.append({name: harness.mean(pair) for name, pair in sums.items()})
    return strategy.logical(harness.to_host(state)), metrics


def assert_near(found, expected, atol=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), found, expected)


IN_CI = [("ddp", 1), ("ddp", 8), ("fsdp", 2), ("zero1", 2)]
TOGETHER = [
    (stem, count) if (stem, count) in IN_CI else exhaustive(stem, count)
    for stem in ("ddp", "fsdp", "zero1")
    for count in (1, 2, 8)
]


@pytest.mark.parametrize(("stem", "count"), TOGETHER)
def test_replicas_that_meet_each_step_are_one(stem, count):
    found, metrics = trained(of_replicas(count, stem=stem))
    spec = spec_of(MODEL, optimizer=optax.sgd(0.1))
    expected, own = trained(recipe("single").build(spec))
    assert_near(found.params, expected.params)
    for step, one in zip(metrics, own, strict=True):
        assert step["loss"] == pytest.approx(one["loss"], abs=1e-6)


def by_hand(count, every, outer, steps=4):
    """(anchor, replicas' parameters) of so many runs of one device, each on rows of its own."""
    rows = BATCH // count
    strategy = recipe("single").build(
        spec_of(MODEL, optimizer=optax.adam(1e-2), clip=MAX_NORM, batch_size=rows)
    )
    states = [strategy.init(jax.random.key(0)) for _ in range(count)]
    anchor = jax.device_get(states[0].params)
    memory = outer.init(anchor)
    for number, batch in enumerate(batches(steps=steps), 1):
        for i in range(count):
            mine = slice(i * rows, (i + 1) * rows)
            placed = strategy.place_batch({name: x[mine] for name, x in batch.items()})
            placed = placed._replace(position=placed.position + i * rows)
            states[i], _ = strategy.train_step(states[i], placed)
        if number % every == 0:
            params = [jax.device_get(state.params) for state in states]
            learnt = jax.tree.map(lambda a, *x: a - sum(x) / count, anchor, *params)
            anchor, memory = outer.step(anchor, learnt, memory)
            states = [x._replace(params=jax.tree.map(jnp.asarray, anchor)) for x in states]
    return anchor, [jax.device_get(state.params) for state in states]


class Nesterov:
    """theta - rate * (momentum * u + d), u = momentum * u + d: as the paper has it."""

    def __init__(self, rate, momentum):
        self.rate, self.momentum = rate, momentum

    def init(self, anchor):
        return jax.tree.map(np.zeros_like, anchor)

    def step(self, anchor, learnt, u):
        u = jax.tree.map(lambda u, d: self.momentum * u + d, u, learnt)
        change = jax.tree.map(lambda u, d: self.rate * (self.momentum * u + d), u, learnt)
        return jax.tree.map(np.subtract, anchor, change), u


@pytest.mark.parametrize(
    ("stem", "count", "every"),
    [
        ("ddp", 2, 2),
        ("fsdp", 4, 3),
        ("fsdp", 2, 1000),
        exhaustive("fsdp", 2, 2),
        exhaustive("ddp", 4, 3),
        exhaustive("ddp", 2, 1000),
    ],
)
def test_each_replica_is_a_run_of_one_device_until_they_meet(stem, count, every):
    """Adam, dropout, and clipping of each replica's own gradient."""
    bound = "@nesterov_outer()", "nesterov_outer.rate = 0.5", "nesterov_outer.momentum = 0.8"
    config = configured(count, *bound[1:], stem=stem, every=every, optimizer=bound[0])
    strategy = config.build(spec_of(MODEL, optimizer=optax.adam(1e-2), clip=MAX_NORM))
    state, _ = trained(strategy)
    anchor, replicas = by_hand(count, every, Nesterov(0.5, 0.8))
    assert_near(state.params, anchor, 2e-5)
    found = state.slots["outer"]["replicas"]["params"]
    assert_near(found, jax.tree.map(lambda *x: np.stack(x), *replicas), 2e-5)


def test_no_step_communicates_over_replicas_but_the_outer_one():
    strategy = of_replicas(2, "shard_params.min_weight_size = 64", every=3)
    traced = collectives(strategy.train_step, strategy.abstract_state, strategy.abstract_batch)
    assert {c.axes for c in traced} == {("fsdp",)}
    assert {c.share for c in of_step(strategy) if c.axes == ("data",)} == {1 / 3}
    step = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch)
    sizes = dict(strategy.mesh.shape)
    sent = collectives_of(step.compile().as_text(), sizes)
    assert sent
    assert {c.axes for c in sent} == {("fsdp",)}
    met = strategy.outer_programs[0].program.lower(strategy.abstract_state).compile().as_text()
    assert {c.axes for c in collectives_of(met, sizes) if c.nbytes > 100} == {("data",)}


def test_what_replicas_learnt_is_averaged_in_the_dtype_that_is_bound():
    strategy = of_replicas(2, "outer.dtype = 'bfloat16'", every=3)
    sent = collectives(strategy.outer_programs[0].program, strategy.abstract_state)
    assert {c.dtype for c in sent} == {"bfloat16"}
    assert {c.axes for c in sent} == {("data",)}
    params = sum(p.nbytes_per_device for p in jax.tree.leaves(strategy.shardings.params))
    assert sum(c.nbytes for c in sent) == params // 2


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["data_parallel.state_axes = ('fsdp', 'data')"], "state_axes"),
        (
            ["data_parallel.reduction = @tree_reduction()", "tree_reduction.logical_shards = 8"],
            "exact sums",
        ),
        (["data_parallel.param_dtype = 'bfloat16'"], "bfloat16"),
        (["data_parallel.sync = @power_sgd()"], "has state"),
        (
            [
                "data_parallel.compression = @compression()",
                "compression.sync = @int8()",
                "compression.error_feedback = True",
            ],
            "compression.error_feedback = True: replicas",
        ),
        (["data_parallel.engine = @compiled"], "data_parallel.outer"),
        (["data_parallel.outer = 3"], "give OuterStep"),
        (
            [
                "data_parallel.compression = @compression()",
                "compression.across = @int8()",
            ],
            "no effect",
        ),
    ],
)
def test_what_replicas_cannot_have_is_refused(bindings, said):
    with pytest.raises(UsageError, match=said):
        of_replicas(2, *bindings)


def with_statistics():
    """A model whose state has a mean of what it has seen, and a number of steps."""

    def init(key, batch):
        return {"w": jax.random.normal(key, (16,))}, {"mean": jnp.zeros(16), "steps": jnp.int32(0)}

    def loss(params, state, batch, keys, *, train, batch_axes):
        x = batch["image"].reshape(-1, 16)
        if train:
            mean = global_mean(x)
            state = {"mean": 0.5 * state["mean"] + 0.5 * mean, "steps": state["steps"] + 1}
        total = jnp.sum(jnp.square(jnp.sum(x * params["w"][None], -1)))
        return LossOutput(total, jnp.float32(x.shape[0]), state, {})

    return TrainableModel(init, loss)


def test_statistics_are_averaged_where_replicas_meet():
    config = configured(2, stem="ddp", every=2)
    strategy = config.build(spec_of(with_statistics(), optimizer=optax.sgd(1e-3)))
    for steps in (1, 2):
        state, _ = trained(strategy, steps)
        own, shared = state.slots["outer"]["replicas"]["model_state"], state.model_state
        assert (own["steps"] == steps).all()
        means = own["mean"]
        if steps == 1:
            rows = batches()[0]["image"].reshape(2, -1, 16).mean(1)
            np.testing.assert_allclose(means, rows / 2, atol=1e-6)
            assert not shared["mean"].any() and shared["steps"] == 0
            before = means
        else:
            assert (means[0] == means[1]).all() and (means[0] == shared["mean"]).all()
            assert shared["steps"] == 2
            rows = batches()[1]["image"].reshape(2, -1, 16).mean(1)
            np.testing.assert_allclose(means[0], (before / 2 + rows / 2).mean(0), atol=1e-6)


def test_frozen_parameters_are_shared_by_all_replicas():
    config = configured(2, every=2)
    spec = dataclasses.replace(
        spec_of(MODEL, optimizer=optax.adam(1e-2)), frozen="layers_0/.*|Dense_0/.*|hidden_0/.*"
    )
    strategy = config.build(spec)
    first, _ = trained(strategy, 0)
    state, _ = trained(strategy, 3)
    frozen = frozen_of(state.model_state)
    assert jax.tree.leaves(frozen)
    jax.tree.map(np.testing.assert_array_equal, frozen, frozen_of(first.model_state))
    assert not frozen_of(state.slots["outer"]["replicas"]["model_state"])


def saved_and_restored(folder, strategy, state, other):
    """What another strategy restores of a state, and what it says."""
    said = []
    progress = Progress(batch_size=BATCH, seed=3, order="", window={})
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        placed = harness.to_devices(strategy, state)
        checkpoints.save(placed, int(state.step), progress, {}, strategy.logical_state)
    with contextlib.closing(Checkpoints(folder, say=said.append)) as checkpoints:
        restored, _ = checkpoints.restore(other)
    return restored, said


def adam(count, devices=8):
    """Replicas with Adam that meet every three steps, on so many devices."""
    config = configured(count, every=3, optimizer="@nesterov_outer()")
    mesh = build_mesh({"data": count, "fsdp": devices // count}, jax.devices()[:devices])
    spec = spec_of(MODEL, optimizer=optax.adam(1e-2), batch_size=24)
    return dataclasses.replace(config, mesh=mesh).build(spec)


def test_a_round_goes_on_from_a_checkpoint_also_on_other_shards(tmp_path):
    strategy = adam(2)
    state, _ = trained(strategy, 4)
    for devices in (8, 4, 6):
        other = adam(2, devices)
        restored, said = saved_and_restored(tmp_path / str(devices), strategy, state, other)
        assert not said
        jax.tree.map(np.testing.assert_array_equal, other.logical(harness.to_host(restored)), state)


def test_other_replicas_begin_a_new_round_at_the_anchor(tmp_path):
    strategy, other = adam(2), adam(4)
    state, _ = trained(strategy, 4)
    restored, said = saved_and_restored(tmp_path, strategy, state, other)
    assert said == ["The run had another number of replicas: a new round begins"]
    found = other.logical(harness.to_host(restored))
    jax.tree.map(np.testing.assert_array_equal, found.params, state.params)
    for x, anchor in zip(
        jax.tree.leaves(found.slots["outer"]["replicas"]["params"]),
        jax.tree.leaves(state.params),
        strict=True,
    ):
        np.testing.assert_array_equal(x, np.stack([anchor] * 4))
    for x, old in zip(*map(jax.tree.leaves, (found.opt_state, state.opt_state)), strict=True):
        assert len(x) == 4
        np.testing.assert_allclose(x, np.stack([old.mean(0)] * 4), rtol=1e-6)
    other.train_step(restored, harness.place_rows(other, batches(24)[0]))


def certificate(**options):
    bench = bench_of("low_communication/diloco", **options)
    return certify(bench, noise(), steps=2)


def test_certify_compares_each_replica_and_each_meeting():
    found = certificate()
    assert found.is_right, str(found)
    assert "meet every" in found.algorithm
    assert sum(check.name.startswith("anchor, step") for check in found.checks) == 5
    assert "anchor, moved to 1 replicas" in {check.name for check in found.checks}


def climbs(outer, anchor, replicas, state, number, *, stored, mean):
    """What moves the anchor away from what replicas learnt."""
    state = SEND(outer, anchor, replicas, state, number, stored=stored, mean=mean)
    return {**state, "sent": jax.tree.map(jnp.negative, state["sent"])}


SEND = Outer.send


def averages_moments(replicas, state, number):
    state, metrics = MEET(replicas, state, number)

    def mean(x):
        return jnp.broadcast_to(x.mean(0)[None].astype(x.dtype), x.shape)

    return state._replace(opt_state=jax.tree.map(mean, state.opt_state)), metrics


def forgets(built, state, say=None):
    slot = state.slots["outer"]
    zeros = jax.tree.map(jnp.zeros_like, slot["state"])
    return state._replace(slots={"outer": {**slot, "state": zeros}})


def the_same_rows(layout, examples):
    if layout.sharding.mesh.shape["data"] == 1:  # of one replica by itself
        return PLACE(layout, examples)
    half = {name: np.concatenate([x[: len(x) // 2]] * 2) for name, x in examples.items()}
    return PLACE(layout, half)


MEET, PLACE = Replicas.meet, BatchLayout.place_batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "bug", "said"),
    [
        ((Outer, "send"), climbs, "wrong sign"),
        ((Replicas, "meet"), averages_moments, "states of optimizers change"),
        ((checkpoint, "resize_slots"), forgets, "a checkpoint lacks"),
        ((BatchLayout, "place_batch"), the_same_rows, "other rows"),
    ],
)
def test_certify_names_what_is_wrong(monkeypatch, place, bug, said):
    monkeypatch.setattr(*place, bug)
    found = Certificate("")
    check_rounds(found, bench_of("low_communication/diloco"), noise(), silent)
    assert not found.is_right
    assert said in found.cause, str(found)


def streaming(*bindings, count=2, every=4, fragments=2, delay=1, mixing=0.0, stem="fsdp"):
    return configured(
        count,
        f"outer.fragments = {fragments}",
        f"outer.delay = {delay}",
        f"outer.mixing = {mixing}",
        *bindings,
        stem=stem,
        every=every,
        optimizer="@nesterov_outer()",
    )


def test_a_fragment_that_is_received_in_the_next_step_is_of_the_step_before():
    """One fragment and no share of their own: what replicas learn while it is sent is lost."""
    spec = spec_of(MODEL, optimizer=optax.sgd(0.1))
    late, _ = trained(streaming(every=2, fragments=1).build(spec), 3)
    prompt, _ = trained(configured(2, every=2, optimizer="@nesterov_outer()").build(spec), 2)
    assert_near(late.params, prompt.params, 1e-6)
    assert_near(*(x.slots["outer"]["replicas"]["params"] for x in (late, prompt)), 1e-6)


@pytest.mark.parametrize("delay", [1, 2])
def test_each_fragment_is_sent_once_a_round_as_it_was_before_the_step(delay):
    strategy = streaming(delay=delay).build(spec_of(MODEL, optimizer=optax.sgd(0.1)))
    outer = strategy.config.outer
    moved = [outer.events(done) for done in range(1, 9)]
    late = [(0, 0), (1, 1)] if delay == 1 else [(0, None), (None, 0), (1, None), (None, 1)]
    assert {x for x in moved if x != Events()} == {Events(*x) for x in late}
    assert [x.send for x in moved] == [None, None, 0, None, 1, None, 0, None]
    sizes = dict(strategy.mesh.shape)
    arguments = strategy.abstract_state, strategy.abstract_batch
    sent = [collectives(x.program, *x.arguments(*arguments)) for x in strategy.outer_programs]
    over = [sum(c.nbytes for c in one if c.axes == ("data",)) for one in sent]
    params = sum(p.nbytes_per_device for p in jax.tree.leaves(strategy.shardings.params))
    assert sum(over) == params and sizes["data"] == 2
    plain = collectives(strategy.train_step, *arguments)
    assert {c.axes for c in plain} == {("fsdp",)}


def test_layers_of_a_stack_go_round_the_fragments():
    strategy = decoder.build(
        "fsdp",
        decoder.model(),
        "data_parallel.outer = @outer()",
        "outer.every = 4",
        "outer.optimizer = @average()",
        "outer.fragments = 2",
        "outer.delay = 1",
        "make_mesh.axes = {'data': 2, 'fsdp': -1}",
    )
    state, anchors = strategy.init(jax.random.key(0)), []
    for seed in range(6):
        anchors.append(jax.device_get(state.params))
        state, _ = harness.take_step(strategy, state, decoder.batch(seed))
    anchors.append(jax.device_get(state.params))
    stacks = [p for p in jax.tree.leaves(strategy.shardings.params) if p.stacked]
    assert stacks and min(p.shape[0] for p in stacks) > 1
    for step in range(6):
        before, after = (by_path(x) for x in anchors[step : step + 2])
        for p in stacks:
            changed = (before[p.path] != after[p.path]).reshape(p.shape[0], -1).any(1)
            due = {2: 0, 4: 1}.get(step)  # at the end of steps 3 and 5
            assert list(changed) == [layer % 2 == due for layer in range(p.shape[0])]


def test_a_fragment_under_way_arrives_after_a_restart(tmp_path):
    strategy = streaming(delay=2).build(spec_of(MODEL, optimizer=optax.adam(1e-2)))
    state, _ = trained(strategy, 3)
    assert strategy.config.outer.events(4) == Events(receive=0)
    restored, said = saved_and_restored(tmp_path, strategy, state, strategy)
    batch = batches()[3]
    ends = [
        strategy.logical(harness.run_step(strategy, x, batch).state)
        for x in (state, strategy.logical(harness.to_host(restored)))
    ]
    assert not said
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_a_fragment_may_not_be_sent_before_the_last_one_is_received():
    with pytest.raises(UsageError, match=r"outer.delay = 3, .* fragment of 2 each 2 steps"):
        streaming(delay=3)


def never_sent(outer, done):
    return Events(*(None if number == 1 else number for number in EVENTS(outer, done)))


EVENTS = Outer.events


@pytest.mark.slow
def test_certify_names_a_fragment_that_is_never_sent(monkeypatch):
    monkeypatch.setattr(Outer, "events", never_sent)
    found = Certificate("")
    check_rounds(found, bench_of("low_communication/diloco_streaming"), noise(), silent)
    assert not found.is_right
    assert "a fragment is never sent" in found.cause, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local_sgd", "diloco_streaming", "sparseloco"])
def test_shipped_strategies_are_certified(name):
    found = certify(bench_of(f"low_communication/{name}"), noise(), steps=2)
    assert found.is_right, str(found)


@pytest.mark.parametrize(("every", "delay"), [(1, 1), (2, 2)])
def test_a_delay_may_be_as_long_as_a_round(every, delay):
    strategy = streaming(every=every, fragments=1, delay=delay).build(
        spec_of(MODEL, optimizer=optax.sgd(0.1))
    )
    first, _ = trained(strategy, every)
    later, _ = trained(strategy, every + delay)
    for x, y in zip(*map(jax.tree.leaves, (first.params, later.params)), strict=True):
        assert (x != y).any()


def test_a_replica_without_weight_hides_no_failure_of_another():
    check = NonfiniteCheck(["w"], "stop", "", print)
    with pytest.raises(RunFailure, match="the gradient of w is not finite"):
        check.check(1, jnp.float32([[NO_WEIGHT, 0], [1, 1]]))
    check.check(1, jnp.float32([[NO_WEIGHT, 0], [0, 0]]))
    assert check.in_a_row == 0


def test_an_optimizer_may_keep_a_number_that_is_infinite():
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    strategy = configured(2, every=2).build(spec_of(MODEL, optimizer=optimizer))
    state = strategy.init(jax.random.key(0))
    NonfiniteCheck([], "stop", "", print).check_state(1, state)
    nan = jax.tree.map(lambda x: x * jnp.nan, state.slots["outer"]["replicas"]["params"])
    slot = {**state.slots["outer"], "replicas": {"params": nan, "model_state": {}}}
    with pytest.raises(RunFailure, match="slots outer/replicas/params"):
        NonfiniteCheck([], "stop", "", print).check_state(1, state._replace(slots={"outer": slot}))


def test_a_fragment_under_way_belongs_to_its_rounds(tmp_path):
    spec = spec_of(MODEL, optimizer=optax.sgd(0.1))
    strategy, other = streaming(delay=2).build(spec), streaming(every=8, delay=2).build(spec)
    state, _ = trained(strategy, 3)
    with pytest.raises(UsageError, match="fragments_delay_every"):
        saved_and_restored(tmp_path, strategy, state, other)
    plain = configured(2, every=2).build(spec)
    with pytest.raises(UsageError, match="fragments_delay_every"):
        saved_and_restored(tmp_path / "plain", strategy, state, plain)
    state, _ = trained(plain, 3)
    rarer = configured(2, every=5).build(spec)
    restored, said = saved_and_restored(tmp_path / "rarer", plain, state, rarer)
    assert restored.step == 3 and not said


def sparse(*bindings, count=2, **options):
    """Replicas that send a few elements of what they learnt."""
    bound = "outer.codec = @top_k()", "top_k.block = 64", "top_k.kept = 4", *bindings
    spec = spec_of(MODEL, optimizer=optax.sgd(0.1))
    return configured(count, *bound, every=2, **options).build(spec)


@pytest.mark.parametrize(("decay", "stem"), [slow(1.0, "ddp"), (0.5, "fsdp")])
def test_what_is_received_and_what_waits_is_what_replicas_learnt(decay, stem):
    """In the meetings after steps 2 and 4; whatever an optimizer makes of it."""
    strategy = sparse(f"outer.error_decay = {decay}", stem=stem)
    dense = configured(2, every=2, stem=stem).build(strategy.spec)
    steps = [trained(strategy, number)[0] for number in range(5)]
    first = trained(dense, 2)[0]

    def lost(state):
        return jax.tree.leaves(state.slots["outer"]["state"]["lost"])

    before, met, again = (steps[number] for number in (0, 2, 4))
    total = sum(x.size for x in jax.tree.leaves(before.params))
    changed = jax.tree.map(lambda x, y: (x != y).sum(), before.params, met.params)
    moved = sum(jax.tree.leaves(changed))
    assert 0 < moved < total / 4
    paths = list(met.slots["outer"]["state"]["lost"]["0"])
    for path, kept in zip(paths, lost(met), strict=True):
        start, end, whole = (by_path(x.params)[path] for x in (before, met, first))
        np.testing.assert_allclose(start - end + kept.mean(0), start - whole, atol=1e-6)
    for path, old, new in zip(paths, lost(met), lost(again), strict=True):
        each = by_path(steps[3].slots["outer"]["replicas"]["params"])[path]
        assert (each[0] != each[1]).any()
        assert not (old == new).all()
    certified = Certificate("")
    check_rounds(
        certified, dataclasses.replace(bench_of("ddp"), config=strategy.config), noise(), silent
    )
    assert certified.is_right, str(certified)


def test_what_waits_is_kept_by_other_replicas_on_average(tmp_path):
    strategy, other = sparse(), sparse(count=4)
    state, _ = trained(strategy, 3)
    restored, said = saved_and_restored(tmp_path / "a", strategy, state, other)
    assert said == ["The run had another number of replicas: a new round begins"]
    found = other.logical(harness.to_host(restored))
    lost = [x.slots["outer"]["state"]["lost"] for x in (state, found)]
    for old, new in zip(*map(jax.tree.leaves, lost), strict=True):
        assert old.any() and len(new) == 4
        np.testing.assert_allclose(new, np.stack([old.mean(0)] * 4), atol=1e-7)
    same, _ = saved_and_restored(tmp_path / "b", strategy, state, strategy)
    jax.tree.map(np.testing.assert_array_equal, strategy.logical(harness.to_host(same)), state)


def loses_what_waits(outer, *given, **options):
    state = SEND(outer, *given, **options)
    return {**state, "lost": jax.tree.map(jnp.zeros_like, state["lost"])}


def test_certify_finds_that_what_encoding_loses_is_not_kept(monkeypatch):
    monkeypatch.setattr(Outer, "send", loses_what_waits)
    found = Certificate("")
    check_rounds(found, bench_of("low_communication/sparseloco"), noise(), silent)
    assert not found.is_right
    assert "replicas meet otherwise" in found.cause, str(found)


def test_encoded_differences_send_their_bytes():
    made = compile_row("sparse", sparse(stem="ddp").config, spec_of(MODEL), topology("cpu:8"))
    params = sum(p.size for p in jax.tree.leaves(made.strategy.logical_state.params))
    sent = 2 * params * (16 / 64) / 2 / 2  # bytes of a block, a ring over two, each second step
    assert made.row.wire_bytes["by_axis"]["data"] == pytest.approx(sent, rel=0.1, abs=100)


def test_a_codec_of_differences_draws_nothing_and_has_no_dtype():
    with pytest.raises(UsageError, match=r"outer.codec = @int8\(\) draws"):
        configured(2, "outer.codec = @int8()", "int8.rounding = 'stochastic'")
    with pytest.raises(UsageError, match=r"outer.codec = @int8\(\) with outer.dtype"):
        configured(2, "outer.codec = @int8()", "outer.dtype = 'bfloat16'")


def test_more_fragments_than_parameters_are_refused():
    with pytest.raises(UsageError, match=r"outer.fragments = 8: one of them has"):
        streaming(every=8, fragments=8).build(spec_of(MODEL))


def test_devices_that_are_a_replica_each_need_no_sync():
    strategy = configured(8, "data_parallel.sync = None", stem="ddp", every=2).build(
        spec_of(MODEL, optimizer=optax.sgd(0.1))
    )
    assert not collectives(strategy.train_step, strategy.abstract_state, strategy.abstract_batch)
    trained(strategy, 2)


def test_an_injected_learning_rate_is_that_of_the_first_replica():
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1)
    strategy = configured(2, every=2).build(spec_of(MODEL, optimizer=optimizer))
    state = strategy.init(jax.random.key(0))
    rate = LearningRate(optimizer, strategy.abstract_state.opt_state, of_replicas=True)
    rate.read(state.opt_state)
    assert rate.after(1) == pytest.approx(0.1)


@pytest.mark.parametrize("fragments", [1, 2])
def test_plan_counts_what_is_sent_at_meetings_with_its_share(fragments):
    delay = fragments - 1  # beside steps, or after them
    config = streaming(every=4, fragments=fragments, delay=delay, stem="ddp")
    made = compile_row("diloco", config, spec_of(MODEL), topology("cpu:8"))
    sent, (_, _, first), *_ = made.row, *made.strategy.programs
    params = sum(p.nbytes for p in jax.tree.leaves(made.strategy.shardings.params))
    assert first == 1 - delay * fragments / 4
    met = 2 * params * (1 / 2) / 4  # a ring over two replicas, each fourth step
    assert sent.wire_bytes["by_axis"]["data"] == pytest.approx(met, abs=50)
    inside = 2 * params * 3 / 4
    assert sent.min_wire_bytes == pytest.approx(inside + met)
    assert sent.wire_ratio == pytest.approx(1, abs=0.02)


def test_a_meeting_that_does_not_fit_is_told():
    class Lowered:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError("Used 25.00G of 15.75G hbm.")

    row = Row("x", available_bytes=int(15.75 * 2**30), fits=True, needed_bytes=1)
    assert compile_step(row, Lowered(), {}) is None
    assert not row.fits and "does not fit" in row.problem
