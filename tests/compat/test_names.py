"""The names of datarax, artifex, xlstm-jax and MLX: signatures, gin, what importing them costs."""

import inspect

import pytest

import research_dp
from research_dp.config import gin_internals
from tests.support.programs import output

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
    "fsdp_apply_gradients": (
        "gradients, parameters, optimizer, fsdp_group=None, dp_group=None, "
        "communication_size=33554432, communication_stream=None, max_norm=None"
    ),
    "shard_params": "params, axis_name, min_weight_size=262144",
    "gather_array_with_mean_grads": (
        "x, axis, axis_name, gather_dtype=None, grad_scatter_dtype=None"
    ),
    "gather_params": "params, axis_name, gather_dtype=None, grad_scatter_dtype=None",
    "shard_module_params": (
        "target, axis_name, min_weight_size=262144, gather_dtype=None, grad_scatter_dtype=None"
    ),
    "sync_gradients": "grads, axis_names",
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


def test_gin_knows_what_a_run_can_reach_alone():
    """A binding of what no slot and no argument takes would have no effect."""
    known = {entry.name for entry in gin_internals.configurables().values()}
    slots = {"shard_params", "gather_params", "sync_gradients", "fsdp_apply_gradients"}
    for name in {name.split(".")[0].removesuffix("()") for name in SIGNATURES}:
        assert getattr(research_dp, name)
        assert (name in known) == (name in slots), name


def test_flax_nnx_is_imported_when_it_is_used():
    code = (
        "import sys, research_dp\n"
        "print([m for m in sys.modules if m.startswith('flax.nnx')])\n"
        "research_dp.spmd_train_step, research_dp.DataParallel\n"
        "print('flax.nnx' in sys.modules)\n"
    )
    assert output(code).split() == ["[]", "True"]
