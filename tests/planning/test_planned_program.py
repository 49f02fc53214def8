"""What `plan` compiles is the program that `train` runs, for the platform of its devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from research_dp.analysis.topologies import topology
from research_dp.distributed.mesh import planning_for, traced_for
from research_dp.distributed.sharding import infer_sharding
from research_dp.distributed.units import Units
from tests.support import decoder
from tests.support.compilers import needs_compiler
from tests.support.recipes import SHIPPED


def built(stem, devices, *bindings):
    # Each device has logits for more than one piece of the vocabulary, and heads for cuDNN.
    model = decoder.model(dtype="bfloat16", width=32, remat="none")
    with planning_for(devices):
        return decoder.build(stem, model, *bindings)


def lengths(strategy):
    """How often the loops of its training step turn."""
    step = strategy.train_step
    traced = jax.make_jaxpr(step)(strategy.abstract_state, strategy.abstract_batch)
    return re.findall(r"length=(\d+)", str(traced)), str(traced)


@pytest.mark.parametrize("stem", SHIPPED)
def test_what_is_planned_for_cpus_is_what_runs_there(stem):
    def text(strategy):
        step = strategy.train_step
        return step.lower(strategy.abstract_state, strategy.abstract_batch).as_text()

    assert text(built(stem, topology("cpu:8").devices)) == text(built(stem, jax.devices()))


def test_the_compilers_program_has_the_pieces_of_a_devices_tokens():
    ours, theirs = (lengths(built(stem, jax.devices()))[0] for stem in ("ddp", "spmd"))
    assert set(ours) == set(theirs)


def test_cpus_run_three_blocks_without_a_loop_unless_they_gather_them():
    found = [lengths(built(stem, jax.devices()))[1] for stem in ("spmd", "fsdp")]
    assert ["unroll=3" in traced for traced in found] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param("h100:1x8", "cudnn", marks=needs_compiler("gpu")),
        pytest.param("v5e-8", None, marks=needs_compiler("tpu")),
    ],
)
@pytest.mark.parametrize("stem", ["ddp", "spmd", "spmd_fsdp", "single"])
def test_what_is_planned_is_traced_for_the_platform_of_the_devices(stem, name, attention):
    count = 1 if stem == "single" else 8
    _, traced = lengths(built(stem, topology(name).devices[:count]))
    assert ("dot_product_attention_fwd" in traced) == (attention == "cudnn")


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(("platform", "kept"), [("cpu", 3), ("gpu", 1)])
def test_accelerators_keep_no_elementwise_results(platform, kept, gathers):
    class Device:
        device_kind = "of no known chip"

    Device.platform = platform
    layouts = infer_sharding({"one": jax.ShapeDtypeStruct((5, 7), np.float32)}, None, 1)
    units = Units((lambda shards, _: shards) if gathers else None, layouts)

    def block(params, x):
        y = x @ params["one"]
        return jnp.sin(y) * jnp.exp(y)

    def saved(x, weights):
        _, backward = jax.vjp(
            lambda x: units.run(block, ("one",), {"one": weights}, x, remat="none"), x
        )
        return backward

    def masked(x, weights):
        def dropped(params, x):
            keep = jax.random.bernoulli(jax.random.key(0), 0.5, (2, 7))
            return jnp.where(keep, x @ params["one"], 0.0)

        return jax.vjp(
            lambda x: units.run(dropped, ("one",), {"one": weights}, x, remat="none"), x
        )[1]

    with traced_for(Mesh(np.array([[Device()]], object), ("data", "fsdp"))):
        shapes = jax.eval_shape(saved, jnp.ones((2, 5)), jnp.ones((5, 7)))
        masks = jax.eval_shape(masked, jnp.ones((2, 5)), jnp.ones((5, 7)))
    results = [leaf for leaf in jax.tree.leaves(shapes) if leaf.shape == (2, 7)]
    assert len(results) == kept
    of_masks = [leaf.dtype for leaf in jax.tree.leaves(masks) if leaf.shape == (2, 7)]
    assert jnp.bool_ in of_masks
    assert platform == "cpu" or of_masks == [jnp.bool_]
