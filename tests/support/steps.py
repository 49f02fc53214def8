"""Small models, states, losses; modes of mapping; where arrays lie: for several test files."""

from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils, nnx, struct
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import research_dp

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
# The collectives of a sharded update.
KINDS = ("reduce-scatter", "all-gather")


def mesh_of(**axes):
    """A mesh of the first devices."""
    sizes = tuple(axes.values())
    devices = jax.devices()[: int(np.prod(sizes))]
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=types, devices=devices)


# Mesh A and mesh B of the cases of xlstm-jax.
A, B = mesh_of(data=8), mesh_of(dp=2, fsdp=4)
X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def on(mesh, function, in_specs=P(), out_specs=P(), check_vma=False):
    """The jitted `shard_map` of a function."""
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(mapped)


def abstract(mesh, function, *args):
    """What each device is left with, local shapes and names, without running anything."""
    return jax.eval_shape(on(mesh, function), *args)


def shard_shapes(x):
    return {shard.data.shape for shard in x.addressable_shards}


def on_all_devices(x):
    return x.sharding.is_fully_replicated and len(x.sharding.device_set) == 8


def in_shard_map(check_vma):
    def run(function, *args, in_axes):
        mesh = Mesh(jax.devices(), ("batch",))
        specs = tuple(P() if axis is None else P("batch") for axis in in_axes)
        local = lambda *xs: jax.tree.map(  # noqa: E731
            lambda x: x[None],
            function(*(x if a is None else x[0] for x, a in zip(xs, in_axes, strict=True))),
        )
        return jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=P("batch"), check_vma=check_vma
        )(*args)

    return run


def in_map(transform):
    def run(function, *args, in_axes):
        return transform(function, axis_name="batch", in_axes=in_axes)(*args)

    return run


MODES = MappingProxyType(
    {
        "shard_map, check_vma=False": in_shard_map(False),
        "shard_map, check_vma=True": in_shard_map(True),
        "pmap": in_map(jax.pmap),
        "vmap": in_map(jax.vmap),
    }
)


def mean_squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def regression():
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    return {"x": x, "y": x @ np.asarray([[2.0], [-1.0]], np.float32) + 3.0}


def linear_and(optimizer):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


@nnx.jit
def sgd_step(model, optimizer, batch):
    return research_dp.spmd_train_step(model, optimizer, mean_squares, batch)


@struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    model_state: dict


def stacked_state(optimizer, params, model_state=None):
    opt_state = optimizer.init(params)
    state = State(jnp.zeros((), jnp.int32), params, opt_state, model_state or {})
    return jax_utils.replicate(state)


def squares(variables, batch, rngs=None):
    return jnp.mean((batch["x"] @ variables["params"]["w"]) ** 2)
