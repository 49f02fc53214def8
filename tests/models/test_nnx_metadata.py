"""Sharding metadata of NNX variables, as MaxText and Tunix write it: a strategy ignores it."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import spmd

import research_dp as rdp
from research_dp.distributed.placement import fingerprint
from research_dp.strategies import TrainSpec
from tests.support.recipes import recipe

EXAMPLE = {
    "x": jax.ShapeDtypeStruct((16,), np.float32),
    "y": jax.ShapeDtypeStruct((), np.int32),
}
BATCH = {"x": np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16), "y": np.arange(16) % 8}


def mesh(*names):
    sizes = (8, *(1 for _ in names[1:]))
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


class Partitioned(nnx.Module):
    """`nnx.with_partitioning`; with rules that name other axes, if it has `names`."""

    def __init__(self, rngs, names=("embed", "mlp"), rules=(("embed", "data"),)):
        init = nnx.initializers.lecun_normal()
        if names:
            init = nnx.with_partitioning(init, names, sharding_rules=rules)
        self.a = nnx.Linear(16, 8, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.a(x)


class Annotated(nnx.Module):
    """`sharding=` of a parameter, with a mesh of its own, and of a variable of one call."""

    def __init__(self, rngs, names=("embed", "mlp")):
        given = {"sharding": names, "mesh": mesh(*names)} if names else {}
        self.w, self.names = nnx.Param(jnp.ones((16, 8)), **given), names

    def __call__(self, x):
        given = {"sharding": self.names} if self.names else {}
        return x @ self.w[...] + nnx.Variable(jnp.ones((1, 8)), **given)[...]


class Scanned(nnx.Module):
    """Layers of `nnx.vmap` under `nnx.scan`, which add a name to the metadata and remove it."""

    def __init__(self, rngs, names=("embed", "mlp")):
        init = nnx.initializers.lecun_normal()
        init = nnx.with_partitioning(init, names) if names else init
        self.transforms = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}} if names else {}

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0, **self.transforms)
        def make(rngs):
            return nnx.Linear(16, 16, kernel_init=init, rngs=rngs)

        self.layers, self.head = make(rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **self.transforms)
        def run(x, layer):
            return nnx.relu(layer(x))

        return self.head(run(x, self.layers))


def trained(stem, factory):
    """The fingerprint of parameters after two steps; the module is applied and evaluated too."""
    model = rdp.from_nnx(factory, loss=optax.softmax_cross_entropy_with_integer_labels)
    spec = TrainSpec(model=model, optimizer=optax.adam(1e-2), example=EXAMPLE, batch_size=16)
    strategy = recipe(stem).build(spec)
    state = strategy.init(0)
    for _ in range(2):
        state, _ = strategy.train_step(state, strategy.place_batch(BATCH))
    strategy.eval_step(state, strategy.place_eval_batch(BATCH))
    assert model.apply(state.params, jnp.ones((3, 16)), state.model_state).shape == (3, 8)
    return fingerprint(state.params)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of `sharding=` and `with mesh`
@pytest.mark.parametrize("kind", [Partitioned, Annotated, Scanned])
@pytest.mark.parametrize("stem", ["single", "fsdp"])
def test_metadata_change_nothing_whatever_mesh_is_active(stem, kind):
    expected = trained(stem, lambda rngs: kind(rngs, names=None))
    for active in (contextlib.nullcontext(), mesh("embed")):  # which lacks most names
        with active, spmd.logical_axis_rules((("embed", "fsdp"),)):
            assert trained(stem, kind) == expected
            assert nnx.using_eager_sharding()
