"""Modules as anybody writes them, in Linen and NNX: nothing of this package inside."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

FEATURES, WIDTH, CLASSES = 8, 16, 10
EXAMPLE = {
    "x": jax.ShapeDtypeStruct((FEATURES,), np.float32),
    "y": jax.ShapeDtypeStruct((), np.int32),
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class LinenNet(nn.Module):
    """Dropout, called twice, and BatchNorm."""

    dropout: float = 0.3
    norm: bool = True

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(WIDTH, use_bias=False)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        layer = nn.Dropout(self.dropout, deterministic=not train)
        return nn.Dense(CLASSES)(layer(layer(nn.relu(x))))


class NnxNet(nnx.Module):
    """The same; its methods `train` and `eval` set the mode."""

    def __init__(self, rngs, dropout=0.3, norm=True):
        self.hidden = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs) if norm else lambda x: x
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.dropout(nnx.relu(self.norm(self.hidden(x))))))


# ---- Dropout alone, wherever a module may have it. Ones become masks. ----


class Twice(nn.Module):
    def setup(self):
        self.layer = nn.Dropout(0.5)

    def __call__(self, x, *, deterministic):
        return jnp.stack([self.layer(x, deterministic=deterministic) for _ in range(2)], axis=1)


class Two(nn.Module):
    @nn.compact
    def __call__(self, x, is_train=False, decode=False):  # a flag that is no mode
        layers = [nn.Dropout(0.5, deterministic=not is_train) for _ in range(2)]
        return jnp.stack([layer(x) for layer in layers], axis=1)


class OnFields(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        layers = [nn.Dropout(0.5, deterministic=not self.train) for _ in range(2)]
        return jnp.stack([layer(x) for layer in layers], axis=1)


class OnMethods(OnFields):
    """A method and a property with names of modes are no fields."""

    @property
    def deterministic(self):
        return not self.train

    def training(self):
        return self.train


class Turn(nn.Module):
    deterministic: bool

    @nn.compact
    def __call__(self, x, _):
        return x, nn.Dropout(0.5, deterministic=self.deterministic)(x)


class Scanned(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x, deterministic=True):
        turn = nn.remat(Turn) if self.remat else Turn
        scan = nn.scan(turn, split_rngs={"dropout": True}, variable_axes={}, length=2, out_axes=1)
        return scan(deterministic)(x, None)[1]


class OverHeads(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        options = {"in_axes": 1, "out_axes": 1, "variable_axes": {}, "axis_size": 2}
        layer = nn.vmap(nn.Dropout, split_rngs={"dropout": True}, **options)
        return layer(0.5, deterministic=not train)(jnp.stack([x, x], axis=1))


class NnxTwice(nnx.Module):
    def __init__(self, *, rngs):
        self.layer = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.stack([self.layer(x), self.layer(x)], axis=1)


class NnxTwo(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])

    def __call__(self, x, train):
        return jnp.stack([layer(x, deterministic=not train) for layer in self.layers], axis=1)


class NnxOwnRngs(nnx.Module):
    def __init__(self, *, rngs):
        self.layer, self.rngs = nnx.Dropout(0.5), rngs

    def __call__(self, x, is_training=False):
        options = {"deterministic": not is_training, "rngs": self.rngs}
        return jnp.stack([self.layer(x, **options) for _ in range(2)], axis=1)


class NnxScanned(nnx.Module):
    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make(rngs):
            return nnx.Dropout(0.5, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 1))
        def turn(x, layer):
            return x, layer(x)

        return turn(x, self.layers)[1]


class NnxRemat(NnxTwice):
    def __call__(self, x):
        @nnx.remat
        def once(layer, x):
            return layer(x)

        return jnp.stack([once(self.layer, x), once(self.layer, x)], axis=1)


# Attention with one key: its weights are ones, and the outputs of queries become their masks.
ONES = {"num_heads": 1, "qkv_features": 1, "out_features": 1, "dropout_rate": 0.5}
ONES |= {"kernel_init": nn.initializers.ones, "use_bias": False}


class AttentionTurn(nn.Module):
    deterministic: bool

    @nn.compact
    def __call__(self, x, _):
        layer = nn.MultiHeadAttention(**ONES, deterministic=self.deterministic)
        return x, layer(x[..., None], x[:, :1, None], mask=jnp.ones((1, 1, 1, 1), bool))[..., 0]


class ScannedAttention(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        options = {"variable_axes": {"params": 0}, "length": 2, "out_axes": 1}
        rngs = {"params": True, "dropout": True}
        scan = nn.scan(nn.remat(AttentionTurn), split_rngs=rngs, **options)
        return scan(deterministic)(x, None)[1]


class TwoAttentions(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        options = {**ONES, "broadcast_dropout": False, "deterministic": not train}
        layers = [nn.MultiHeadDotProductAttention(**options) for _ in range(2)]
        mask = jnp.ones((x.shape[0], 1, x.shape[1], 1), bool)
        y = [layer(x[..., None], x[:, :1, None], mask=mask)[..., 0] for layer in layers]
        return jnp.stack(y, axis=1)


class NnxAttentions(nnx.Module):
    def __init__(self, *, rngs):
        options = {**ONES, "in_features": 1, "decode": False, "rngs": rngs}
        layers = (nnx.MultiHeadAttention(**options, broadcast_dropout=x) for x in (True, False))
        self.layers = nnx.List(layers)

    def __call__(self, x):
        y = [layer(x[..., None], x[:, :1, None])[..., 0] for layer in self.layers]
        return jnp.stack(y, axis=1)


class NnxScannedAttention(nnx.Module):
    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make(rngs):
            return nnx.MultiHeadAttention(**ONES, in_features=1, decode=False, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 1))
        @nnx.remat
        def turn(x, layer):
            return x, layer(x[..., None], x[:, :1, None])[..., 0]

        return turn(x, self.layers)[1]


MASKS = {
    "linen": [Twice(), Two(), OnFields(), OnMethods(), Scanned(), Scanned(remat=True), OverHeads()],
    "nnx": [NnxTwice, NnxTwo, NnxOwnRngs, NnxScanned, NnxRemat],
    "attention": [ScannedAttention(), TwoAttentions(), NnxAttentions, NnxScannedAttention],
}


# ---- What is refused, or takes part by `keys` and `batch_axes` ----


def linen(call):
    """A Linen module of this compact `__call__`."""
    return type("Net", (nn.Module,), {"__call__": nn.compact(call), "__annotations__": {}})()


def own_mean(self, x):
    return nn.Dense(CLASSES)(x - lax.pmean(x, "batch"))


def masked_norm(self, x, train):
    mask = jnp.ones((x.shape[0], 1), bool)
    return nn.Dense(CLASSES)(nn.BatchNorm(not train)(x, mask=mask))


def sown(self, x):
    self.sow("kept", "mean", x.mean())
    return nn.Dense(CLASSES)(x)


def always_drops(self, x):
    return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=False)(x))


def always_batch_statistics(self, x):
    return nn.Dense(CLASSES)(nn.BatchNorm(use_running_average=False)(x))


def one_mask(self, x, train):
    return nn.Dense(CLASSES)(nn.Dropout(0.5, (0,), deterministic=not train)(x))


def of_features(self, x, train):
    layer = nn.Dropout(0.5, deterministic=not train)
    return nn.Dense(CLASSES)(layer(x.T).T)


def over_examples(self, x, train):
    layer = nn.vmap(nn.Dropout, variable_axes={}, split_rngs={"dropout": True})
    return nn.Dense(CLASSES)(layer(0.5, deterministic=not train)(x))


def noise(self, x, train):
    if train:
        x = x + jax.random.normal(self.make_rng("noise"), x.shape)
    return nn.Dense(CLASSES)(x)


def attention(self, x, deterministic, dropout_rate=0.3, **options):
    y = x.reshape(x.shape[0], 2, -1)
    options |= {"dropout_rate": dropout_rate, "deterministic": deterministic}
    y = nn.MultiHeadDotProductAttention(2, **options)(y)
    return nn.Dense(CLASSES)(y.reshape(x.shape[0], -1))


def attention_without_a_batch(self, x, deterministic):
    layer = nn.MultiHeadAttention(2, dropout_rate=0.3, deterministic=deterministic)
    return nn.Dense(CLASSES)(layer(x))


def own_attention(query, key, value, dropout_rng, deterministic):
    options = {"dropout_rng": dropout_rng, "dropout_rate": 0.1, "deterministic": deterministic}
    return nn.dot_product_attention(query, key, value, **options)


def attention_of_its_own(self, x, deterministic):
    return attention(self, x, deterministic, attention_fn=own_attention)


def attention_that_always_drops(self, x):
    return attention(self, x, False)


def statistics_of_a_device(self, x, train):
    mean = self.variable("batch_stats", "mean", jnp.zeros, (FEATURES,))
    if train:
        mean.value = x.mean(0)
    return nn.Dense(CLASSES)(x - mean.value[None])


def statistics_of_all(self, x, train, batch_axes=()):
    mean = self.variable("batch_stats", "mean", jnp.zeros, (FEATURES,))
    if train:
        mean.value = lax.pmean(x.mean(0), batch_axes)
    return nn.Dense(CLASSES)(x - mean.value[None])


def noise_by_example(self, x, keys=None):
    if keys is not None:
        x = x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
    return nn.Dense(CLASSES)(x)


class NnxAttention(nnx.Module):
    def __init__(self, rngs, **options):
        options |= {"out_features": CLASSES, "dropout_rate": 0.3, "decode": False, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(2, 4, 16, **options)

    def __call__(self, x):
        return self.attention(x.reshape(x.shape[0], 2, -1)).sum(1)


class NnxOwnAttention(NnxAttention):
    def __init__(self, rngs):
        def own(*args, dropout_rng, module, **options):
            return nnx.dot_product_attention(*args, dropout_rng=dropout_rng, **options)

        super().__init__(rngs, attention_fn=own)


class NnxAlwaysDrops(NnxNet):
    def __init__(self, rngs):
        super().__init__(rngs, norm=False)

    def __call__(self, x, train):
        return super().__call__(x)


class NnxAlwaysBatchStatistics(NnxNet):
    def __init__(self, rngs):
        super().__init__(rngs, dropout=0.0)

    def __call__(self, x, train):
        return super().__call__(x)


class NnxOwnNorm(nnx.BatchNorm):
    def __call__(self, x):
        return super().__call__(2 * x)


class NnxAlwaysOwnNorm(NnxAlwaysBatchStatistics):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = NnxOwnNorm(WIDTH, rngs=rngs)


class NnxTransformed(nnx.Module):
    """BatchNorm, a constant and a counter inside a transform, which makes other arrays of them."""

    transform = staticmethod(nnx.remat)

    def __init__(self, rngs):
        self.net = NnxNet(rngs, dropout=0.0)
        self.net.norm = NnxOwnNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.offset, self.calls = nnx.Variable(jnp.arange(8.0)), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        @self.transform
        def turn(module, x):
            module.calls[...] += 1
            return module.net(x + module.offset[None])

        return turn(self, x)


class NnxJitted(NnxTransformed):
    transform = staticmethod(nnx.jit)


class NnxPlainArray(nnx.Module):
    def __init__(self, rngs):
        self.offset = jnp.arange(8.0)

    def __call__(self, x):
        return x + self.offset[None]


class NnxInside(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NnxPlainArray(rngs)])

    def __call__(self, x):
        return self.layers[0](x)


class NnxSized(nnx.Module):
    def __init__(self, width, rngs):
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(x)


class NnxByKey(NnxSized):
    def __init__(self, key):
        super().__init__(FEATURES, key)


class NnxMaskedNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.norm(x, mask=jnp.ones((x.shape[0], 1), bool))
