"""Models as users bring them: Flax's own BatchNorm and Dropout, nothing of this package inside.

`--import=tests.support.plain_models` registers them.
"""

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from research_dp.models.flax.linen import linen_functions
from research_dp.models.image_classifiers import image_classifier
from research_dp.types import LossOutput, TrainableModel

CLASSES, WIDTH = 10, 16


class BatchNormNet(nn.Module):
    axes: bool = False

    @nn.compact
    def __call__(self, x, *, train, batch_axes=()):
        x = nn.Dense(WIDTH)(x.reshape(x.shape[0], -1))
        over = (batch_axes or None) if self.axes and train else None
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=over)(x)
        return nn.Dense(CLASSES)(nn.relu(x))


class DropoutNet(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.relu(nn.Dense(WIDTH)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


class NnxBatchNormNet(nnx.Module):
    def __init__(self, shape, rngs):
        height, width, channels = shape
        self.hidden = nnx.Linear(height * width * channels, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x, *, train):
        x = self.norm(self.hidden(x.reshape(x.shape[0], -1)), use_running_average=not train)
        return self.head(nnx.relu(x))


class NnxDropoutNet(nnx.Module):
    def __init__(self, shape, rngs):
        height, width, channels = shape
        self.hidden = nnx.Linear(height * width * channels, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x, *, train):
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.head(self.dropout(x, deterministic=not train))


def with_own_loss(init, apply):
    """A model whose loss was written without this package's helpers."""

    def loss(params, model_state, batch, keys, *, train, batch_axes=()):
        logits, model_state = apply(params, model_state, batch["image"], keys, train)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        mask = batch.get("mask", jnp.ones(losses.shape))
        correct = jnp.sum((jnp.argmax(logits, -1) == batch["label"]) * mask)
        count = jnp.sum(mask)
        sums = {"accuracy": (correct, count)}
        return LossOutput(jnp.sum(losses * mask), count, model_state, sums)

    return TrainableModel(init, loss, {"num_classes": CLASSES})


def linen_alone(net, key_of=None):
    """A Linen module as Flax applies it; `key_of` makes one key for all examples of theirs."""

    def init(key, batch):
        state = dict(net.init(key, jnp.zeros(batch["image"].shape), train=False))
        return state.pop("params"), state

    def apply(params, model_state, x, keys, train):
        variables = {"params": params, **model_state}
        mutable = list(model_state) if train else []
        rngs = {"dropout": key_of(keys)} if train and key_of else {}
        logits, updates = net.apply(variables, x, train=train, mutable=mutable, rngs=rngs)
        return logits, {**model_state, **updates}

    return with_own_loss(init, apply)


def linen_dropout(key_of):
    """`nn.Dropout` with a key for all examples, made of their keys."""
    return linen_alone(DropoutNet(), key_of)


def linen_dropout_by_example():
    """`nn.Dropout` under `vmap`, each example with its key."""
    net = DropoutNet()

    def init(key, batch):
        x = jnp.zeros(batch["image"].shape)
        return net.init(key, x, train=False)["params"], {}

    def apply(params, model_state, x, keys, train):
        def one(x, key):
            return net.apply({"params": params}, x[None], train=True, rngs={"dropout": key})[0]

        if train:
            return jax.vmap(one)(x, keys), model_state
        return net.apply({"params": params}, x, train=False), model_state

    return with_own_loss(init, apply)


def nnx_alone(net):
    """An NNX module as Flax calls it, whose keys and counts are model state; keys as numbers."""

    def make(key, shape):
        model = net(shape, nnx.Rngs(key))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def init(key, batch):
        _, params, rest = make(key, batch["image"].shape[1:])
        return params, jax.tree.map(_as_numbers, rest)

    def apply(params, model_state, x, keys, train):
        graph, _, rest = make(jax.random.key(0), x.shape[1:])
        model_state = jax.tree.map(_as_keys, model_state, rest)
        model = nnx.merge(graph, nnx.State(params), nnx.State(model_state))
        logits = model(x, train=train)
        rest = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        return logits, jax.tree.map(_as_numbers, rest)

    return with_own_loss(init, apply)


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_numbers(x):
    return jax.random.key_data(x) if _is_key(x) else x


def _as_keys(x, like):
    return jax.random.wrap_key_data(x) if _is_key(like) else x


@gin.register(module="tests")
def linen_batch_norm(axes: bool = False) -> TrainableModel:
    """A perceptron with `nn.BatchNorm`: statistics of a device or, with `axes`, of all devices."""
    if axes:
        return image_classifier(linen_functions(BatchNormNet(axes=True)), CLASSES)
    return linen_alone(BatchNormNet())


# What a user writes, by its name.
MODELS = {
    "nn.BatchNorm": linen_batch_norm,
    "nnx.BatchNorm": lambda: nnx_alone(NnxBatchNormNet),
    "nn.Dropout": lambda: linen_dropout(lambda keys: keys[0]),
    "nnx.Dropout": lambda: nnx_alone(NnxDropoutNet),
}
