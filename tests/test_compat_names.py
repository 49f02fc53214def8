"""The names of datarax and artifex: signatures, gin, what importing them costs."""

import inspect

import gin
import numpy as np
import pytest
from programs import output

import research_dp

# Parameters and defaults, as the seed pages print them; `self` is left out.
SIGNATURES = {
    "create_data_parallel_sharding": "mesh, data_axis='data'",
    "place_batch_on_shards": "batch, sharding",
    "spmd_train_step": "model, optimizer, loss_fn, batch",
    "data_parallel_train_step": "loss_fn, optimizer, batch, state, rngs=None",
    "place_model_state_on_shards": "state, mesh, param_sharding=None",
    "place_nnx_state_on_shards": "state, mesh, filter_sharding",
    "reduce_gradients_across_devices": "gradients, reduce_type='mean', axis_name='batch'",
    "reduce_gradient_tree": "gradients, reduce_type='mean'",
    "data_parallel_rules": "data_axis='data'",
    "DataParallel().__init__": "",
    "DataParallel().create_data_parallel_sharding": "mesh, data_axis='data'",
    "DataParallel().shard_batch": "batch, sharding",
    "DataParallel().shard_model_state": "state, mesh, param_sharding='replicate'",
    "DataParallel().all_reduce_gradients": "gradients, reduce_type='mean', axis_name='batch'",
    "DataParallel().replicate_params": "params, mesh",
    "DataParallel.create_data_parallel_sharding_static": "mesh, data_axis='data'",
    "DataParallel.shard_batch_static": "batch, sharding",
    "DataParallel.all_reduce_gradients_static": (
        "gradients, reduce_type='mean', axis_name='batch'"
    ),
    "DeviceMeshManager": "devices=None",
    "DeviceMeshManager.create_device_mesh": "mesh_shape, devices=None",
    "DeviceMeshManager.create_data_parallel_mesh": "num_devices=None, axis_name='data'",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_seed_pages(name):
    found = inspect.signature(eval(f"research_dp.{name}")).parameters.values()
    ours = [p.replace(annotation=p.empty) for p in found if p.kind is not p.KEYWORD_ONLY]
    expected = eval(f"lambda {SIGNATURES[name]}: None")
    assert ours == list(inspect.signature(expected).parameters.values())
    assert all(p.default is not p.empty for p in found if p.kind is p.KEYWORD_ONLY)
    top = name.split(".")[0].removesuffix("()")
    assert top in research_dp.__all__


def test_artifex_has_five_methods_and_three_twins():
    own = {name for name, x in vars(research_dp.DataParallel).items() if not name.startswith("_")}
    twins = {name for name in own if name.endswith("_static")}
    assert (len(own - twins), len(twins)) == (5, 3)


def test_every_name_can_be_composed_in_gin():
    for name in {name.split(".")[0].removesuffix("()") for name in SIGNATURES}:
        assert getattr(research_dp, name)
        assert gin.get_configurable(f"distributed.{name}")
    gin.parse_config("place_batch_on_shards.sharding = @create_data_parallel_sharding()")
    gin.parse_config("create_data_parallel_sharding.mesh = @make_mesh()")
    gin.parse_config("make_mesh.axes = {'data': 8}")
    placed = gin.get_configurable("place_batch_on_shards")({"x": np.zeros((8, 2))})
    assert placed["x"].addressable_shards[0].data.shape == (1, 2)
    assert isinstance(gin.get_configurable("DataParallel")(), research_dp.DataParallel)


def test_flax_nnx_is_imported_when_it_is_used_even_after_gin_is_locked():
    code = (
        "import sys, gin, research_dp\n"
        "print([m for m in sys.modules if m.startswith('flax.nnx')])\n"
        "gin.finalize()\n"
        "research_dp.spmd_train_step, research_dp.DataParallel\n"
        "print(gin.config_is_locked())\n"
        "with gin.unlock_config():\n"
        "    gin.parse_config('spmd_train_step.max_grad_norm = 2.0')\n"
        "print(gin.query_parameter('spmd_train_step.max_grad_norm'))\n"
    )
    assert output(code).split() == ["[]", "True", "2.0"]
