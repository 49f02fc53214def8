"""A hand-written data-parallel step with jax, flax and optax alone."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.GroupNorm(num_groups=8)(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2), padding="SAME")
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = ConvNet()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, 1000)
    optimizer = optax.adamw(schedule, weight_decay=1e-4)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def init(key):
        params = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)["params"]
        return params, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data"), P()),
        out_specs=P(),
        check_vma=False,
    )
    def step(params, opt_state, image, label, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))

        def loss(params):
            logits = model.apply({"params": params}, image, train=True, rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
            correct = (logits.argmax(-1) == label).mean()
            return losses.mean(), correct

        (value, correct), grads = jax.value_and_grad(loss, has_aux=True)(params)
        # pmean sums over devices and divides by their number: the mean of the devices' means.
        grads = jax.lax.pmean(grads, "data")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = jax.lax.pmean((value, correct), "data")
        return optax.apply_updates(params, updates), opt_state, metrics

    params, opt_state = init(jax.random.key(0))
    rng = np.random.default_rng(0)
    sharded = NamedSharding(mesh, P("data"))
    image = jax.device_put(rng.normal(size=(128, 8, 8, 1)).astype(np.float32), sharded)
    label = jax.device_put(rng.integers(0, 10, 128).astype(np.int32), sharded)
    jax.block_until_ready(step(params, opt_state, image, label, jax.random.key(1)))
    print("First step done")


if __name__ == "__main__":
    main()
