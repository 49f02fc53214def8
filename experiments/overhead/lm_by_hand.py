"""The steps of `lm_tiny` written by hand with jax and optax alone.

`lm_steps.py` compares the shipped strategies with them. `jit` leaves communication to the compiler.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN = 256, 128, 4, 4, 384
MATRICES = ("qkv", "out", "gate_up", "down")
NORMS = {"attention_norm": None, "mlp_norm": None}
OPTIMIZER = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)
CLIP = 1.0
BATCH = ("data", "fsdp")


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]


def rotate(x):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)[None]
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def block(x, w):
    qkv = (norm(x, w["attention_norm"]) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x = x + y.reshape(x.shape) @ w["out"]
    gate, up = jnp.split(norm(x, w["mlp_norm"]) @ w["gate_up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ w["down"]


def loss(w, tokens, unshard, policy):
    """Mean loss of the local tokens; `unshard` all-gathers a weight, `policy` is for remat."""

    def layer(x, shards):
        return block(x, jax.tree.map(unshard, shards)), None

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)
    table = unshard(w["embed"])
    x, _ = lax.scan(layer, table[tokens] * WIDTH**0.5, w["blocks"])
    logits = norm(x, w["norm"]) @ table.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def split_dims(strategy):
    """Dim of each weight that is sharded over 'fsdp' (None: replicated), as in the strategies."""
    if strategy in ("ddp", "jit"):
        return {"embed": None, "norm": None, "blocks": dict.fromkeys([*MATRICES, *NORMS])}
    return {"embed": 1, "norm": None, "blocks": {**dict.fromkeys(MATRICES, 1), **NORMS}}


def specs_of(dims):
    return jax.tree.map(
        lambda dim: P() if dim is None else P(*[None] * dim, "fsdp"), dims, is_leaf=is_none
    )


def is_none(x):
    return x is None


def each(function, dims, *trees):
    """Maps `function(dim, *leaves)` over the weights."""
    return jax.tree.map(function, dims, *trees, is_leaf=is_none)


def scatter(dim, g):
    """The local slice of the mean over 'fsdp'; the sum and the one division are here."""
    if dim is None:
        return lax.pmean(g, "fsdp")
    return lax.psum_scatter(g, "fsdp", scatter_dimension=dim, tiled=True) / lax.axis_size("fsdp")


def gather(dim, x):
    return x if dim is None else lax.all_gather(x, "fsdp", axis=dim, tiled=True)


def clip(grads, dims):
    """Clips by the global norm; only squares of slices are summed over 'fsdp'."""
    squares = each(lambda dim, g: (dim, jnp.sum(g * g)), dims, grads)
    pairs = jax.tree.leaves(squares, is_leaf=lambda x: isinstance(x, tuple))
    sliced = sum(s for dim, s in pairs if dim is not None)
    total = sum(s for dim, s in pairs if dim is None)
    if any(dim is not None for dim, _ in pairs):
        total = total + lax.psum(sliced, "fsdp")
    size = jnp.sqrt(total)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / size), grads), size


def make_step(strategy, dims, loss):
    """Returns a step: (weights, optimizer state, tokens) -> the same, loss, gradient norm."""

    def whole_in_use(x):
        """All-gathers a weight at its use; one block's matrix is sharded along its first dim."""
        dim = 1 if x.shape[0] == VOCABULARY else 0
        return x if x.ndim == 1 else checkpoint_name(gather(dim, x), "unshard")

    def slice_of(dim, x):
        if dim is None:
            return x
        size = x.shape[dim] // lax.axis_size("fsdp")
        return lax.dynamic_slice_in_dim(x, lax.axis_index("fsdp") * size, size, dim)

    def mean_of_scattered(dim, g):
        """Divides sharded gradients, which the gather's transpose summed; averages the others."""
        return lax.pmean(g, "fsdp") if dim is None else g / lax.axis_size("fsdp")

    def gradients(w, tokens):
        if strategy in ("fsdp", "hsdp"):
            policy = jax.checkpoint_policies.save_anything_except_these_names("unshard")
            value, grads = jax.value_and_grad(loss)(w, tokens, whole_in_use, policy)
            grads = each(mean_of_scattered, dims, grads)
            return value, lax.pmean(grads, "data") if strategy == "hsdp" else grads
        full = each(gather, dims, w) if strategy == "fsdp_keep" else w
        value, grads = jax.value_and_grad(loss)(full, tokens, lambda x: x, None)
        if strategy == "jit":
            return value, grads
        return value, lax.pmean(grads, BATCH) if strategy == "ddp" else each(scatter, dims, grads)

    def step(w, state, tokens):
        value, grads = gradients(w, tokens)
        grads, size = clip(grads, dims)
        zero = strategy in ("zero1", "zero2")
        slices = each(slice_of, dims, w) if zero else w
        updates, state = OPTIMIZER.update(grads, state, slices)
        new = optax.apply_updates(slices, updates)
        new = each(gather, dims, new) if zero else new
        return new, state, value if strategy == "jit" else lax.pmean(value, BATCH), size

    return step


def build(strategy, mesh, weights, loss=loss):
    """Returns (placed weights and optimizer state, compiled step) of a strategy."""
    dims = split_dims(strategy)
    param_specs = specs_of(split_dims("ddp") if strategy in ("zero1", "zero2") else dims)
    state_specs = optax.tree_map_params(
        OPTIMIZER,
        lambda _, spec: spec,
        jax.eval_shape(OPTIMIZER.init, weights),
        specs_of(dims),
        transform_non_params=lambda _: P(),
    )

    def placed(specs):
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
        )

    weights = jax.device_put(weights, placed(param_specs))
    state = jax.jit(OPTIMIZER.init, out_shardings=placed(state_specs))(weights)
    step, outs = make_step(strategy, dims, loss), (param_specs, state_specs, P(), P())
    if strategy != "jit":
        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(param_specs, state_specs, P(BATCH)),
            out_specs=outs,
            check_vma=False,
        )
    return (weights, state), jax.jit(step, donate_argnums=(0, 1), out_shardings=placed(outs))
