"""datarax and artifex: acceptance cases 21, 24 and 25, reductions, meshes and train steps.

Of case 25 the step of `spmd_train_step` is in test_train_steps.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp
from tests.support.steps import MODES, squares, stacked_state

DataParallel, DeviceMeshManager = research_dp.DataParallel, research_dp.DeviceMeshManager
reduce_across = research_dp.reduce_gradients_across_devices


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


@pytest.mark.parametrize("manager", [DeviceMeshManager(), DeviceMeshManager])
def test_case_24_meshes_as_instance_and_static(manager):
    four = manager.create_device_mesh({"data": 4})
    assert (dict(four.shape), four.size) == ({"data": 4}, 4)
    assert four.axis_types == (jax.sharding.AxisType.Auto,)
    assert list(four.devices.ravel()) == jax.devices()[:4]
    assert manager.create_device_mesh({"model": 2, "data": 4}).axis_names == ("model", "data")
    assert manager.create_device_mesh([("b", 2), ("a", 4)]).axis_names == ("b", "a")
    assert manager.create_device_mesh({"data": np.int64(2)}).size == 2  # as `np.prod` gives it
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
        ({"data": 2.0}, r"mesh_shape = {'data': 2.0}: give sizes"),
    ],
)
def test_case_24_impossible_meshes_are_errors_with_the_numbers(shape, message):
    with pytest.raises(ValueError, match=message):
        DeviceMeshManager.create_device_mesh(shape)
    if shape == {"data": 100}:
        with pytest.raises(ValueError, match=message):
            DeviceMeshManager().create_data_parallel_mesh(100)


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
