"""The functions of datarax and artifex: acceptance cases 20 to 25.

Each test of a case has the case's number in its name; the numbers asserted are the case's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from steps import (
    MODES,
    linear_and,
    on_all_devices,
    regression,
    sgd_step,
    shard_shapes,
    squares,
    stacked_state,
)

import research_dp

DataParallel, DeviceMeshManager = research_dp.DataParallel, research_dp.DeviceMeshManager
reduce_across = research_dp.reduce_gradients_across_devices


@pytest.fixture(scope="module", params=["auto", "explicit"])
def any_mesh(request):
    """Eight devices on axis 'data', of each type of axis that users have."""
    if request.param == "explicit":
        return jax.make_mesh((8,), ("data",))
    return Mesh(jax.devices(), ("data",))


@pytest.fixture(scope="module")
def mesh():
    return Mesh(jax.devices(), ("data",))


# --- case 20: batches ------------------------------------------------------------------------


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
        with pytest.raises(ValueError, match=rf"'b/{name}' of shape \(\).* rank 0"):
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


# --- case 21: reductions ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_case_21_mean_and_sum_in_every_mode(mode, dtype):
    def both(value):
        tree = {"g": [value]}
        dp = DataParallel()
        return (
            reduce_across(tree)["g"][0],
            dp.all_reduce_gradients(tree, "mean")["g"][0],
            reduce_across(tree, "SUM")["g"][0],
            DataParallel.all_reduce_gradients_static(tree, "Sum")["g"][0],
        )

    values = jnp.arange(8).astype(dtype)
    found = MODES[mode](both, values, in_axes=(0,))
    for value, expected in zip(found, (3.5, 3.5, 28, 28), strict=True):
        np.testing.assert_array_equal(value.astype("float32"), np.full(8, expected))
    assert found[0].dtype == ("float32" if dtype == "int32" else dtype)
    assert found[2].dtype == dtype


def test_case_21_unknown_reductions_are_refused_anywhere():
    for function in (
        reduce_across,
        research_dp.reduce_gradient_tree,
        DataParallel().all_reduce_gradients,
        DataParallel.all_reduce_gradients_static,
    ):
        for wrong in ("max", None):
            with pytest.raises(ValueError) as error:
                function({"w": jnp.ones(2)}, wrong)
            assert str(error.value) == f"Unsupported reduce_type: {wrong}. Use 'mean' or 'sum'."


def test_case_21_an_axis_that_is_not_bound_is_an_error_that_says_so():
    for outside in (reduce_across, jax.jit(reduce_across)):
        with pytest.raises(NameError, match=r"unbound axis name: batch.*inside shard_map"):
            outside({"w": jnp.ones(2)})


def test_case_21_tree_reduction_makes_scalars():
    tree = {"w": jnp.asarray([1.0, 2.0, 3.0]), "b": jnp.asarray([4.0, 6.0])}
    assert research_dp.reduce_gradient_tree(tree) == {"w": 2.0, "b": 5.0}
    assert research_dp.reduce_gradient_tree(tree, "SUM") == {"w": 6.0, "b": 10.0}


# --- case 22: state --------------------------------------------------------------------------


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


# --- case 23: NNX state ----------------------------------------------------------------------


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


# --- case 24: meshes -------------------------------------------------------------------------


@pytest.mark.parametrize("manager", [DeviceMeshManager(), DeviceMeshManager])
def test_case_24_meshes_as_instance_and_static(manager):
    four = manager.create_device_mesh({"data": 4})
    assert (dict(four.shape), four.size) == ({"data": 4}, 4)
    assert four.axis_types == (jax.sharding.AxisType.Auto,)
    assert list(four.devices.ravel()) == jax.devices()[:4]
    assert manager.create_device_mesh({"model": 2, "data": 4}).axis_names == ("model", "data")
    assert manager.create_device_mesh([("b", 2), ("a", 4)]).axis_names == ("b", "a")
    two = manager.create_device_mesh({"x": 2}, devices=jax.devices()[4:])
    assert list(two.devices) == jax.devices()[4:6]
    assert dict(manager.create_data_parallel_mesh().shape) == {"data": 8}
    assert dict(manager.create_data_parallel_mesh(2, axis_name="batch").shape) == {"batch": 2}
    assert dict(manager.create_model_parallel_mesh(2).shape) == {"model": 2}
    hybrid = manager.create_hybrid_mesh(4, 2)
    assert manager.get_mesh_info(hybrid) == {"total_devices": 8, "axes": {"data": 4, "model": 2}}


def test_case_24_a_manager_of_some_devices_uses_those():
    manager = DeviceMeshManager(jax.devices()[2:5])
    assert manager.num_devices == 3
    assert list(manager.create_data_parallel_mesh().devices) == jax.devices()[2:5]
    manager.devices.clear()
    assert manager.num_devices == 3
    with pytest.raises(ValueError, match="requires 4 devices, but only 3"):
        manager.create_data_parallel_mesh(4)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"data": 100}, "Not enough devices: mesh data 100 requires 100 devices, but only 8"),
        ({"data": 4, "model": 4}, "data 4 x model 4 requires 16 devices, but only 8"),
        ({"data": 0}, "axis 'data' has size 0"),
        ({"data": -1}, "axis 'data' has size -1"),
        ([("data", 2), ("data", 4)], "'data' is named 2 times"),
        ({"data": 2.0}, "axis 'data' has size 2.0"),
    ],
)
def test_case_24_impossible_meshes_are_errors_with_the_numbers(shape, message):
    with pytest.raises(ValueError, match=message):
        DeviceMeshManager.create_device_mesh(shape)
    if shape == {"data": 100}:
        with pytest.raises(ValueError, match=message):
            DeviceMeshManager().create_data_parallel_mesh(100)


# --- case 25: train steps --------------------------------------------------------------------


@pytest.mark.parametrize("in_context", [False, True])
def test_case_25_spmd_step_follows_one_device(any_mesh, in_context):
    single, optimizer = linear_and(optax.sgd(0.01))
    before = single.kernel[...]
    expected = sgd_step(single, optimizer, jax.tree.map(jnp.asarray, regression()))

    model, optimizer = linear_and(optax.sgd(0.01))
    for part in (model, optimizer):
        state = research_dp.place_nnx_state_on_shards(nnx.state(part), any_mesh, {...: P()})
        nnx.update(part, state)
    sharding = research_dp.create_data_parallel_sharding(any_mesh)
    batch = research_dp.place_batch_on_shards(regression(), sharding)
    if in_context:
        with jax.set_mesh(any_mesh):
            loss = sgd_step(model, optimizer, batch)
    else:
        loss = sgd_step(model, optimizer, batch)

    assert loss.ndim == 0
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(model.kernel[...], single.kernel[...], atol=1e-6)
    np.testing.assert_allclose(model.bias[...], single.bias[...], atol=1e-6)
    assert np.abs(model.kernel[...] - before).max() > 1e-3


def test_case_25_data_parallel_train_step():
    optimizer = optax.sgd(0.1)
    traced = []

    def loss_fn(variables, batch):  # need not take rngs
        traced.append(variables)
        assert set(variables) == {"params", "stats"}
        return squares(variables, batch)

    state = stacked_state(optimizer, {"w": jnp.ones((3, 1))}, {"stats": jnp.ones(2)})
    batch = {"x": jnp.ones((8, 2, 3))}
    first, metrics = research_dp.data_parallel_train_step(loss_fn, optimizer, batch, state)
    np.testing.assert_array_equal(metrics["loss"], np.full(8, 9.0))
    np.testing.assert_allclose(first.params["w"], np.full((8, 3, 1), 0.4), rtol=1e-6)
    np.testing.assert_array_equal(first.step, np.ones(8))
    assert jax.tree.structure(first) == jax.tree.structure(state)
    second, _ = research_dp.data_parallel_train_step(loss_fn, optimizer, batch, first)
    np.testing.assert_allclose(second.params["w"], np.full((8, 3, 1), 0.4 - 0.1 * 2.4), rtol=1e-5)
    assert len(traced) == 1  # compiled once
    with pytest.raises(ValueError, match=r"'state/params/w' of shape \(3, 1\).* first dim of dev"):
        unstacked = state.replace(params={"w": jnp.ones((3, 1))})
        research_dp.data_parallel_train_step(loss_fn, optimizer, batch, unstacked)


def test_case_25_data_parallel_train_step_averages_other_data_on_each_device():
    optimizer = optax.sgd(0.1)
    state = stacked_state(optimizer, {"w": jnp.ones((1, 1))})
    batch = {"x": np.arange(8.0, dtype=np.float32).reshape(8, 1, 1)}
    state, metrics = research_dp.data_parallel_train_step(squares, optimizer, batch, state)
    np.testing.assert_allclose(metrics["loss"], np.full(8, 17.5))  # the mean of 0, 1, 4, ..., 49
    np.testing.assert_allclose(state.params["w"].ravel(), np.full(8, 1 - 0.1 * 2 * 17.5))


def test_rules_of_the_example():
    rules = research_dp.data_parallel_rules()
    assert rules("data", "embed") == ("data", None)
    assert research_dp.data_parallel_rules("batch")("heads", "data") == (None, "batch")
    with pytest.raises(AttributeError, match="nope"):
        rules("nope")
