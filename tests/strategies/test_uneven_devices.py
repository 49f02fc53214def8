"""Arrays that the devices do not divide: padded in memory, and nowhere that a user looks."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from research_dp.analysis.topologies import topology
from research_dp.certification.certify import certify
from research_dp.config import load
from research_dp.distributed import sharding
from research_dp.distributed.mesh import planning_for
from research_dp.distributed.placement import fingerprint, nbytes
from research_dp.distributed.sharding import ShardDecision, by_path, choose_dim, cut_shapes
from research_dp.errors import UsageError
from research_dp.planning.estimate import compile_row
from research_dp.runs import checkpoint_files
from research_dp.runs.checkpoint import Checkpoints
from research_dp.runs.checksum import tree_checksums
from research_dp.runs.manifest import Progress
from research_dp.strategies import TrainSpec
from research_dp.strategies.jaxpr_collectives import of_step
from research_dp.training.initial import InitialParams
from research_dp.training.sharding_table import parameter_table
from research_dp.types import LossOutput, TrainableModel
from tests.support import decoder
from tests.support.certified import bench_of, noise
from tests.support.compilers import AS_USERS_COMPILE
from tests.support.marks import exhaustive
from tests.support.recipes import recipe

WIDTH, BATCH = 11, 840
EXAMPLE = {"x": jax.ShapeDtypeStruct((7,), np.float32)}
PROGRESS = Progress(batch_size=BATCH, seed=0, order="", window={})


def init(key, batch):
    first, second, third = jax.random.split(key, 3)
    return {
        "matrix": jax.random.normal(first, (7, WIDTH)),
        "square": jax.random.normal(second, (WIDTH, WIDTH)),
        "small": {"vector": jax.random.normal(third, (WIDTH,)), "empty": jnp.zeros((0, 3))},
        "scalar": jnp.float32(1),
    }, {}


def loss(params, model_state, batch, keys, *, train, batch_axes):
    y = (
        jnp.tanh(batch["x"] @ params["matrix"] @ params["square"])
        @ jax.tree.leaves(params["small"])[-1]
    )
    total = jnp.sum(jnp.square(y * params["scalar"] - batch["x"][:, 0]))
    return LossOutput(total, jnp.float32(len(y)), model_state, {})


def build(stem, devices, *bindings, optimizer=None, more=(), init=init, **options):
    spec = TrainSpec(
        model=TrainableModel(init, loss),
        optimizer=optimizer or optax.adamw(1e-2),
        batch_size=BATCH,
        **{"max_grad_norm": 1.0, "example": EXAMPLE, **options},
    )
    with planning_for(jax.devices()[:devices]):
        small = "shard_params.min_weight_size = 8"
        sizes = ["make_mesh.axes = {'data': 2, 'fsdp': -1}"] if stem.startswith("hsdp") else []
        sizes = [] if any("make_mesh.axes" in x for x in bindings) else sizes
        return recipe(stem, *sizes, small, *bindings, more=more).build(spec)


def steps(strategy, count=3):
    """The state after some steps."""
    state = strategy.init(np.uint32(0))
    for seed in range(count):
        x = np.random.default_rng(seed).normal(size=(BATCH, 7)).astype(np.float32)
        batch = strategy.place_batch({"x": x[strategy.train_rows]})
        state, _ = strategy.train_step(state, batch)
    return state


def on_host(strategy, state):
    return strategy.logical(jax.tree.map(np.array, state))


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "accumulated": optax.adamw(1e-2),
}


@functools.cache
def alone(name):
    strategy = build("single", 1, optimizer=OPTIMIZERS[name])
    return on_host(strategy, steps(strategy))


CELLS = [("fsdp", 3), ("fsdp", 5), ("fsdp_keep", 7), ("zero1", 3), ("zero2", 7), ("ddp", 6)]
CELLS += [("spmd_fsdp", 5), ("hsdp", 6), ("hsdp_zero1", 6), ("hsdp_zero1", 8)]


@pytest.mark.parametrize(
    ("stem", "devices", "name"),
    [
        (*cell, name) if name == "adamw" or cell == CELLS[1] else exhaustive(*cell, name)
        for cell in CELLS
        for name in OPTIMIZERS
    ],
)
def test_any_number_of_devices_computes_what_one_does(stem, devices, name):
    several = 2 if name == "accumulated" and BATCH % (2 * devices) == 0 else 1
    strategy = build(stem, devices, optimizer=OPTIMIZERS[name], accumulation_steps=several)
    state = steps(strategy)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
    jax.tree.map(near, on_host(strategy, state).params, alone(name).params)
    # What is not meant stays 0, so that no norm counts it.
    cut = strategy.logical(jax.tree.map(np.array, state))
    again = sharding.fitted_tree(cut._asdict(), strategy.abstract_state._asdict())
    assert_same(again, jax.tree.map(np.array, state)._asdict())


def test_a_device_holds_its_share_of_the_state():
    state = build("fsdp", 5).abstract_state
    here, total = nbytes({"params": state.params, "opt_state": state.opt_state})
    counts = 4 + 3 * 4 * 1  # the step of Adam; three scalars
    assert here == (total - counts) // 5 + counts
    assert state.params["square"].shape == (11, 15)
    assert build("zero1", 5).abstract_state.params["square"].shape == (11, 11)


def test_a_plan_counts_the_padding():
    strategy = build("fsdp", 5)
    row = compile_row("fsdp", strategy.config, strategy.spec, topology("cpu:5")).row
    # Of 11 x 11, 7 x 11 and 11 elements, with their two moments; 4 bytes each.
    elements = sum(3 * (stored - n) for n, stored in ((121, 165), (77, 105), (11, 15)))
    assert row.padding_bytes == round(4 * elements / 5)
    assert row.parameters == 121 + 77 + 11 + 1


def test_a_dim_that_is_divided_is_taken_before_one_that_is_padded():
    assert choose_dim((10, 12), 6, 0, pads=True) == ShardDecision(1)
    told = ShardDecision(None, "no free dim of (10, 12) is divisible by 7")
    assert choose_dim((10, 12), 7, 0) == told
    reason = "no free dim of (10, 12) is divisible by 7"
    chosen = choose_dim((10, 12), 7, 0, pads=True)
    assert chosen == ShardDecision(1, reason)
    told = sharding.padding_or_none(chosen, (10, 12), 7, pads=True)
    assert told == ShardDecision(1, f"padded to 14: {reason}")
    alone = sharding.padding_or_none(chosen, (10, 12), 7, pads=False)
    assert alone == ShardDecision(None, reason)
    assert choose_dim((50_257, 767), 8, 0, pads=True).dim == 0
    assert choose_dim((50_257, 767), 8, 0, (False, True), pads=True).dim == 1
    assert choose_dim((1, 1), 8, 0, pads=True).dim is None  # nothing to gain


@pytest.mark.parametrize(
    ("kind", "shape", "devices", "dim", "reason"),
    [
        (sharding.STACK, (2048, 8192), 24, 0, "padded to 2064"),
        (sharding.STACK, (20, 8192), 24, 1, "why"),
        (sharding.TABLE, (50_257, 768), 7, 1, "padded to 770"),
        (sharding.TABLE, (50_257, 6), 7, 0, "why"),
        (sharding.STACK, (2048, 8192), 16, 0, ""),
    ],
)
def test_a_little_more_padding_is_worth_the_dim_that_suits(kind, shape, devices, dim, reason):
    chosen = choose_dim(shape, devices, 0, pads=True)._replace(movable=True)
    if chosen.reason:
        chosen = chosen._replace(reason="why")
    found = sharding.decision_in_use(chosen, kind, shape, devices)
    assert (found.dim, found.reason) == (dim, reason)


def test_the_table_shows_padding_and_an_own_rule_may_ask_for_it():
    rows = by_path(build("fsdp", 7, optimizer=optax.sgd(1)).shardings.params)
    assert rows["square"].reason.startswith("padded to 14: no free dim of (11, 11)")
    dims = "dim_by_path.dims = {'square': 0, 'matrix': None}"
    own = build("fsdp", 7, "shard_params.rule = @dim_by_path", dims)
    assert own.abstract_state.params["square"].shape == (14, 11)
    assert own.abstract_state.params["matrix"].shape == (7, 11)
    assert on_host(own, steps(own, 1)).params["square"].shape == (11, 11)
    shown = {row[0]: row[-1] for row in parameter_table(own).rows}
    assert shown["square"] == "padded to 14: 7 devices do not divide dim 0 of (11, 11)"


def without_empty(key, batch):
    params, state = init(key, batch)
    return {**params, "small": params["small"]["vector"]}, state


def test_matrices_are_cut_before_they_are_mixed():
    found = []
    # Optax's Muon divides by the size of an array.
    for stem, devices in (("single", 1), ("fsdp", 5), ("zero1", 3), ("hsdp_zero1", 6)):
        load.reset()
        strategy = build(stem, devices, optimizer=optax.contrib.muon(1e-2), init=without_empty)
        found.append(on_host(strategy, steps(strategy)).params)
    for others in found[1:]:
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), others, found[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of six devices, its state, and that on the host."""
    folder = tmp_path_factory.mktemp("saved")
    load.reset()
    strategy = build("fsdp", 6)
    state = steps(strategy, 1)
    save(folder, strategy, state)
    return folder, strategy, state, on_host(strategy, state)


def save(folder, strategy, state):
    checkpoints = Checkpoints(folder)
    checkpoints.save(state, 1, PROGRESS, {}, strategy.logical_state)
    checkpoints.close()


def restored(folder, strategy):
    checkpoints = Checkpoints(folder)
    state, _ = checkpoints.restore(strategy)
    checkpoints.close()
    return state


@pytest.mark.parametrize(
    ("stem", "devices"),
    [("single", 1), ("fsdp", 7), ("fsdp", 8), ("zero1", 3), ("spmd_fsdp", 5), ("hsdp_zero1", 8)],
)
def test_a_run_continues_on_another_number_of_devices(saved, stem, devices):
    folder, _, _, expected = saved
    strategy = build(stem, devices)
    state = restored(folder, strategy)
    assert_same(on_host(strategy, state), expected)
    jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim) or 1 / 0,
                 state, strategy.abstract_state)  # fmt: skip


def test_no_padding_is_on_the_disk(saved):
    folder, strategy, state, expected = saved
    arrays = by_path(checkpoint_files.arrays_in(folder / "1" / "state"))
    shapes = {path: x.shape for path, x in by_path(expected).items() if x.size}
    assert {path: tuple(arrays[path].shape) for path in shapes} == shapes
    manifest, fields = checkpoint_files.read_fields(folder / "1", "params")
    assert manifest.leaves["params/square"].shape == (11, 11)
    assert_same(fields["params"], expected.params)
    assert state.params["square"].shape == (11, 12)
    cut = cut_shapes(state, strategy.logical_state)
    assert tree_checksums(state, cut) == tree_checksums(expected)
    params = cut_shapes(state.params, strategy.logical_state.params)
    assert fingerprint(state.params, shapes=params) == fingerprint(expected.params)


def test_a_save_that_ended_before_arrays_were_cut_is_read(saved, tmp_path, monkeypatch):
    _, strategy, state, expected = saved
    monkeypatch.setattr(checkpoint_files, "cut_arrays", lambda *_: None)
    save(tmp_path, strategy, state)
    for stem, devices in (("fsdp", 7), ("single", 1)):
        load.reset()
        other = build(stem, devices)
        assert_same(on_host(other, restored(tmp_path, other)), expected)
    _, fields = checkpoint_files.read_fields(tmp_path / "1", "params")
    assert_same(fields["params"], expected.params)


@pytest.mark.parametrize("kind", ["safetensors", "checkpoint"])
@pytest.mark.parametrize(("stem", "devices"), [("fsdp", 8), ("zero1", 7), ("hsdp_zero1", 6)])
def test_initial_parameters_are_read_onto_padded_shards(saved, tmp_path, kind, stem, devices):
    folder, _, _, expected = saved
    path = folder / "1"
    if kind == "safetensors":
        path = tmp_path / "weights.safetensors"
        save_file({k: v for k, v in by_path(expected.params).items() if v.size}, path)
    strategy = build(stem, devices)
    given = InitialParams(str(path)).arrays(strategy, lambda line: None)
    state = strategy.init(np.uint32(1), given)
    assert_same(on_host(strategy, state).params, expected.params)


@pytest.mark.filterwarnings("ignore:.*nothing is sharded")
def test_bits_are_those_of_one_device_under_deterministic_options():
    """Which pad nothing: a compiler rounds an update otherwise where its arrays are cut."""
    bits = set()
    for stem, devices in (("single", 1), ("fsdp", 4), ("zero1", 8), ("hsdp_zero1", 8)):
        load.reset()
        options = f"data_parallel.compiler_options = {AS_USERS_COMPILE}"
        shards = "tree_reduction.logical_shards = 8"
        strategy = build(stem, devices, options, shards, more=["options/deterministic.gin"])
        assert strategy.abstract_state.params["square"].shape == (11, 11)
        bits.add(fingerprint(on_host(strategy, steps(strategy, 2)).params))
    assert len(bits) == 1


def test_state_over_all_devices_has_the_bits_of_hsdp():
    found = {}
    for stem in ("hsdp", "hsdp_zero1"):
        load.reset()
        strategy = build(stem, 8, max_grad_norm=None)  # whose squares are added in another order
        found[stem] = on_host(strategy, steps(strategy)).params
    assert_same(found["hsdp"], found["hsdp_zero1"])
    state = strategy.abstract_state
    of_all = {"square": (11, 16), "matrix": (8, 11)}
    assert {k: state.params[k].shape for k in of_all} == of_all
    moments = state.opt_state[0].mu["square"]
    assert moments.sharding.spec == jax.sharding.PartitionSpec(None, ("fsdp", "data"))
    assert state.params["square"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")


@pytest.mark.parametrize(("stem", "sizes"), [("zero1", (2, 2)), ("zero2", (2, 4))])
def test_slices_over_two_axes_are_numbered_as_their_axes_are(stem, sizes):
    axes = f"make_mesh.axes = {{'data': {sizes[0]}, 'fsdp': {sizes[1]}}}"
    over = "data_parallel.state_axes = ('fsdp', 'data')"
    strategy = build(stem, sizes[0] * sizes[1], axes, over)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
    jax.tree.map(near, on_host(strategy, steps(strategy)).params, alone("adamw").params)


@pytest.mark.parametrize("axes", ["{'data': 1, 'fsdp': -1}", "{'data': -1, 'fsdp': 1}"])
def test_one_group_and_groups_of_one_device_shard_the_state_too(axes):
    strategy = build("hsdp_zero1", 4, f"make_mesh.axes = {axes}")
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
    jax.tree.map(near, on_host(strategy, steps(strategy)).params, alone("adamw").params)
    moments = strategy.abstract_state.opt_state[0].mu["square"]
    assert moments.sharding.shard_shape(moments.shape) in ((11, 3), (3, 11))


def test_padding_changes_no_collective():
    """A parameter that is cut would be saved for the backward pass if policies did not see it."""
    counts = []
    for width in (12, 11):  # of which 4 devices divide one

        def resized(key, batch, width=width):
            first, second = jax.random.split(key)
            shape = {"matrix": (8, width), "square": (width, width)}
            keys = {"matrix": first, "square": second}
            params = {k: jax.random.normal(keys[k], s) for k, s in shape.items()}
            return {**params, "small": jnp.ones(width), "scalar": jnp.float32(1)}, {}

        load.reset()
        strategy = build("fsdp", 4, init=resized, example={"x": jax.ShapeDtypeStruct((8,), "f4")})
        counts.append(collections.Counter((x.kind, x.times) for x in of_step(strategy)))
    assert counts[0] == counts[1]


def test_a_loop_of_ones_own_continues_on_another_number_of_devices(tmp_path):
    one = build("fsdp", 4, init=without_empty)  # which Orbax does not save
    state = steps(one, 1)
    expected = on_host(one, state)
    load.reset()
    other = build("zero1", 6, init=without_empty)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", one.logical(state))
        checkpointer.wait_until_finished()
        found = other.stored(checkpointer.restore(tmp_path / "saved", other.logical_state))
    assert_same(on_host(other, found), expected)


@pytest.mark.parametrize("name", ["a%20b", "q?x", "h#1"])
def test_arrays_are_cut_in_folders_of_any_name(saved, tmp_path, name):
    _, strategy, state, _ = saved
    save(tmp_path / name, strategy, state)
    arrays = by_path(checkpoint_files.arrays_in(tmp_path / name / "1" / "state"))
    assert tuple(arrays["params/square"].shape) == (11, 11)


@pytest.mark.parametrize(("stem", "devices"), [("fsdp", 3), ("hsdp_zero1", 4)])
def test_what_is_padded_is_certified(stem, devices):
    axes = ["make_mesh.axes = {'data': 2, 'fsdp': 2}"] if stem == "hsdp_zero1" else []
    with planning_for(jax.devices()[:devices]):
        bench = bench_of(stem, bindings=axes, spec={"batch_size": 12 * devices})
        done = certify(bench, noise(), steps=2)
    assert done.certified, done
    load.reset()


@pytest.mark.parametrize(
    ("stem", "tied", "option"),
    [
        exhaustive("fsdp", True, ()),
        ("fsdp", True, ("data_parallel.prefetch = True",)),
        ("zero2", False, ()),
        exhaustive("spmd_fsdp", True, ()),
    ],
)
def test_stacks_and_tables_are_padded_too(stem, tied, option):
    model = decoder.model(width=20, heads=2, mlp_width=22, vocab_size=67, tied=tied)
    _, expected = decoder.run(decoder.build("single", model))
    load.reset()
    strategy = decoder.build(stem, model, *option)
    _, found = decoder.run(strategy)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    padded = cut_shapes(strategy.abstract_state.opt_state, strategy.logical_state.opt_state)
    assert any("block" in path for path in padded) and any("table" in path for path in padded)


def few_rows(key, batch):
    """Of 8 devices each has a part of a row of `matrix`; no dim of `square` will do."""
    first, second, third = jax.random.split(key, 3)
    return {
        "matrix": jax.random.normal(first, (7, 4)),
        "square": jax.random.normal(second, (4, 6)),
        "small": jax.random.normal(third, (6,)),
        "scalar": jnp.float32(1),
    }, {}


def test_slices_are_cut_in_parts_where_devices_are_more():
    reason = "no free dim of (4, 6) is divisible by 8"
    chosen = choose_dim((4, 6), 8, 0, pads=True)
    assert chosen == ShardDecision(0, reason, parts=2)
    assert choose_dim((4, 5), 8, 0, pads=True).parts == 1
    assert choose_dim((4, 6), 8, 0, (True, False), pads=True).parts == 1
    assert choose_dim((2048, 2048), 4096, pads=True)[::3] == (0, 2)
    told = sharding.padding_or_none(chosen, (4, 6), 8, pads=True)
    assert told.reason == f"dim 1 cut in 2 too: {reason}"
    assert build("fsdp", 8, init=few_rows).abstract_state.params["square"].shape == (8, 3)


@pytest.mark.parametrize("stem", ["fsdp", "fsdp_keep", "zero1", "spmd_fsdp", "hsdp_zero1"])
def test_what_is_stored_in_parts_is_whole_for_others(stem, tmp_path, capfd):
    single = build("single", 1, init=few_rows)
    expected = on_host(single, steps(single)).params
    load.reset()
    strategy = build(stem, 8, init=few_rows)
    state = steps(strategy)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
    jax.tree.map(near, on_host(strategy, state).params, expected)
    save(tmp_path, strategy, state)
    arrays = by_path(checkpoint_files.arrays_in(tmp_path / "1" / "state"))
    assert tuple(arrays["opt_state/0/mu/square"].shape) == (4, 6)
    for other, devices in (("fsdp", 8), ("single", 1), ("zero1", 3)):
        load.reset()
        target = build(other, devices, init=few_rows)
        assert_same(on_host(target, restored(tmp_path, target)), on_host(strategy, state))
        given = InitialParams(str(tmp_path / "1")).arrays(target, lambda line: None)
        begun = on_host(target, target.init(np.uint32(1), given)).params
        assert_same(begun, on_host(strategy, state).params)


@pytest.mark.parametrize(
    ("stem", "bindings", "message"),
    [
        ("fsdp", ["data_parallel.state_axes = ('data',)"], r"name mesh axes, 'fsdp' first"),
        ("fsdp", ["data_parallel.state_axes = ('fsdp', 'rows')"], r"there are \['data', 'fsdp'\]"),
        ("fsdp", ["data_parallel.sync = @scatter_gradients"], r"Use @sync_gradients"),
        ("hsdp", ["data_parallel.state_axes = ('fsdp', 'data')"], r"slots must fit each other"),
    ],
)
def test_axes_of_the_state_that_do_not_fit(stem, bindings, message):
    with pytest.raises(UsageError, match=message):
        build(stem, 4, *bindings)


def test_a_batch_that_does_not_divide_is_told_its_two_neighbours():
    with pytest.raises(UsageError, match=r"= 7 devices .* 11 = 77\. Take 770 or 847\."):
        build("ddp", 7, accumulation_steps=11)
    with pytest.raises(UsageError, match=r"Take 1722, the least\."):
        build("ddp", 7, accumulation_steps=246)
