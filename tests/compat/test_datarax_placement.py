"""datarax and artifex: acceptance cases 20, 22 and 23, batches and states on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import research_dp
from tests.support.steps import on_all_devices, shard_shapes

DataParallel = research_dp.DataParallel


def mixed_batch():
    return {"x": jnp.ones((16, 3)), "y": np.arange(16), "s": "lbl", "n": 3}


def test_case_20_datarax_shards_arrays_and_passes_the_rest_through(mesh):
    sharding = research_dp.create_data_parallel_sharding(mesh)
    assert sharding == NamedSharding(mesh, P("data"))
    batch = {**mixed_batch(), "none": None, "f": np.float32(2.0)}
    placed = research_dp.place_batch_on_shards(batch, sharding)
    assert shard_shapes(placed["x"]) == {(2, 3)}
    assert shard_shapes(placed["y"]) == {(2,)}
    np.testing.assert_array_equal(placed["y"], np.arange(16))
    for name in ("s", "n", "none", "f"):
        assert placed[name] is batch[name]


def test_case_20_artifex_shards_every_leaf_and_refuses_those_of_rank_0(mesh):
    sharding = DataParallel().create_data_parallel_sharding(mesh)
    arrays = {name: mixed_batch()[name] for name in "xy"}
    for placed in (
        DataParallel().shard_batch(arrays, sharding),
        DataParallel.shard_batch_static(arrays, sharding),
    ):
        assert [shard_shapes(placed[name]) for name in "xy"] == [{(2, 3)}, {(2,)}]
    for name in "sn":
        with pytest.raises(ValueError, match=rf"'b/{name}' (of shape \(\).* rank 0|is 'lbl')"):
            DataParallel.shard_batch_static({"b": {name: mixed_batch()[name]}}, sharding)


@pytest.mark.parametrize(
    "function", [research_dp.place_batch_on_shards, DataParallel.shard_batch_static]
)
def test_case_20_errors_name_the_leaf_and_the_numbers(function, mesh):
    sharding = research_dp.create_data_parallel_sharding(mesh)
    with pytest.raises(ValueError, match=r"'a/0' of shape \(10, 2\).*length 10.*divisible by 8"):
        function({"a": [np.ones((10, 2))]}, sharding)
    with pytest.raises(ValueError, match=r"'a' of shape \(\).*rank 0"):
        function({"a": jnp.ones(())}, sharding)
    with pytest.raises(ValueError, match=r"axis 'nope' is not found in mesh {'data': 8}"):
        research_dp.create_data_parallel_sharding(mesh, "nope")
    # Rows that nobody has are divisible; keys are arrays.
    placed = function(
        {"e": np.zeros((0, 3)), "k": jax.random.split(jax.random.key(0), 8)}, sharding
    )
    assert shard_shapes(placed["e"]) == {(0, 3)}
    assert shard_shapes(placed["k"]) == {(1,)}


def state_of_params():
    dense = {"kernel": jnp.ones((16, 4)), "bias": jnp.ones((4,))}
    return {"params": {"dense": dense, "empty": {}}, "count": jnp.zeros((), jnp.int32), "n": 3}


@pytest.mark.parametrize("how", [None, "replicate"])
def test_case_22_default_is_replication(how, any_mesh):
    placed = research_dp.place_model_state_on_shards(state_of_params(), any_mesh, how)
    assert all(on_all_devices(x) for x in jax.tree.leaves(placed))
    assert placed["params"]["empty"] == {}
    replicated = DataParallel().replicate_params(state_of_params(), any_mesh)
    by_default = DataParallel().shard_model_state(state_of_params(), any_mesh)
    for other in (replicated, by_default):
        assert jax.tree.structure(other) == jax.tree.structure(placed)
        assert all(on_all_devices(x) for x in jax.tree.leaves(other))


def test_case_22_typos_are_errors(mesh):
    for function in (
        research_dp.place_model_state_on_shards,
        DataParallel().shard_model_state,
    ):
        with pytest.raises(ValueError, match=r"'Replicate'.*'replicate', 'shard', None or a dict"):
            function(state_of_params(), mesh, "Replicate")


def test_case_22_rules_by_path(any_mesh):
    state = state_of_params()
    rules = {"params/dense/kernel": PartitionSpec("data", None)}
    placed = research_dp.place_model_state_on_shards(state, any_mesh, rules)
    dense = placed["params"]["dense"]
    assert dense["kernel"].sharding.spec == P("data", None)
    assert shard_shapes(dense["kernel"]) == {(2, 4)}
    assert dense["bias"] is state["params"]["dense"]["bias"]
    assert (placed["n"], placed["params"]["empty"]) == (3, {})
    untouched = research_dp.place_model_state_on_shards(state, any_mesh, {})
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, untouched, state))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"params/dense/kernal": P("data")}, r"'params/dense/kernal'.*'params/dense/kernel'"),
        ({"dense": P("data")}, r"param_sharding 'dense' matches none of 4 paths"),
        ({"params/dense/bias": P("data")}, r"bias' of shape \(4,\).*length 4.*divisible by 8"),
        ({"params/dense/bias": P("model")}, r"'params/dense/bias': axis 'model' is not found"),
        ({"params/dense/bias": "data"}, r"'data' of 'params/dense/bias' is no .*PartitionSpec"),
        ({"count": P("data")}, r"'count' of shape \(\).*rank 0"),
    ],
)
def test_case_22_rules_that_do_not_fit_are_errors(rules, message, mesh):
    with pytest.raises(ValueError, match=message):
        research_dp.place_model_state_on_shards(state_of_params(), mesh, rules)


def test_case_22_shard_keeps_whole_what_cannot_be_divided(any_mesh):
    optimizer = optax.adam(1e-3)
    more = {"wide": jnp.ones((8, 16)), "tall": jnp.ones((10, 16))}
    params = {**state_of_params()["params"]["dense"], **more}
    state = {"params": params, "opt": optimizer.init(params), "empty": {}}
    for placed in (
        research_dp.place_model_state_on_shards(state, any_mesh, "shard"),
        DataParallel().shard_model_state(state, any_mesh, param_sharding="shard"),
    ):
        adam = placed["opt"][0]
        assert shard_shapes(placed["params"]["kernel"]) == {(2, 4)}
        assert shard_shapes(adam.mu["kernel"]) == {(2, 4)}
        assert shard_shapes(placed["params"]["wide"]) == {(1, 16)}  # dim 0, as artifex has it
        assert on_all_devices(placed["params"]["tall"])
        assert on_all_devices(adam.count)  # a scalar
        assert on_all_devices(placed["params"]["bias"])  # four elements, eight devices
        assert placed["empty"] == {}


def test_case_22_nnx_states_keep_their_variables(mesh):
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    state = nnx.state(model)
    for placed in (
        DataParallel().shard_model_state(state, mesh, "shard"),
        research_dp.place_model_state_on_shards(state, mesh, {"layers/0/kernel": P("data")}),
    ):
        assert shard_shapes(placed["layers"][0]["kernel"][...]) == {(1, 8)}
        assert jax.tree.structure(placed) == jax.tree.structure(state)
        nnx.update(model, placed)
    assert isinstance(placed["layers"][0]["kernel"], nnx.Param)


def by_path(path, variable):
    return path[-1] == "bias"


@pytest.mark.parametrize("make", [dict, nnx.StateSharding])
def test_case_23_filters_place_nnx_state_on_any_mesh(make, any_mesh):
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    whole = NamedSharding(any_mesh, P())
    filters = make({by_path: P(), nnx.Param: P("data"), ...: whole})  # the first match wins
    state = nnx.state(model)
    placed = research_dp.place_nnx_state_on_shards(state, any_mesh, filters)
    assert isinstance(placed, nnx.State)
    assert shard_shapes(placed["scale"][...]) == {(1,)}
    assert on_all_devices(placed["bias"][...])
    assert on_all_devices(placed["mean"][...])
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    assert [type(placed[k]) for k in ("scale", "mean")] == [nnx.Param, nnx.BatchStat]


def test_case_23_linear_kernel_is_sharded_on_dim_0_also_under_jit(any_mesh):
    @jax.jit
    def doubled(state):
        doubled = jax.tree.map(lambda x: 2 * x, state)
        return research_dp.place_nnx_state_on_shards(doubled, any_mesh, {nnx.Param: P("data")})

    state = nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    placed = research_dp.place_nnx_state_on_shards(state, any_mesh, {nnx.Param: P("data")})
    for result in (placed, doubled(state)):
        assert shard_shapes(result["kernel"][...]) == {(1, 8)}
    np.testing.assert_array_equal(placed["kernel"][...], state["kernel"][...])


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({nnx.BatchStat: P()}, "'bias', a Param, matches none of the filters"),
        ({nnx.Param: P("data")}, r"'bias' of shape \(6,\).*divisible by 8"),
        ({nnx.Param: P("model")}, "axis 'model' is not found"),
    ],
)
def test_case_23_errors_name_the_path(filters, message, any_mesh):
    state = nnx.state(nnx.Linear(8, 6, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        research_dp.place_nnx_state_on_shards(state, any_mesh, filters)
