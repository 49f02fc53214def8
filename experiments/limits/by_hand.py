"""A hand-written FSDP step of a 1.2 B-parameter decoder, compiled for absent devices.

It is the reference for the strategies, and a check of `research_dp.analysis`: an independent reader
measured the same program. Needs the extras plan-gpu and plan-tpu.

    python experiments/limits/by_hand.py h100:8x8 mapped cudnn [compiler_option=value ...]
    python experiments/limits/by_hand.py h100:8x8 compiled cudnn
    python experiments/limits/by_hand.py v5e-64 mapped flash
"""

import sys
import time

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from research_dp.analysis.program_cost import read
from research_dp.analysis.topologies import topology

LAYERS, WIDTH, HIDDEN, VOCABULARY, LENGTH, HEADS = 16, 2048, 8192, 32768, 2048, 16
BLOCK = {
    "qkv": (LAYERS, WIDTH, 3 * WIDTH),
    "out": (LAYERS, WIDTH, WIDTH),
    "up": (LAYERS, WIDTH, 2 * HIDDEN),
    "down": (LAYERS, HIDDEN, WIDTH),
}
SHAPES = {**BLOCK, "embedding": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
ROWS = {name: P(*[None] * (len(shape) - 2), "fsdp") for name, shape in SHAPES.items()}
OPTIMIZER = optax.adamw(1e-4)


def norm(x):
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(jnp.bfloat16)


def rotate(x):
    half = x.shape[-1] // 2
    angle = jnp.arange(LENGTH)[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def attend(q, k, v, how):
    if how != "flash":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scale = (WIDTH // HEADS) ** -0.5
    return flash_attention(q, k, v, causal=True, sm_scale=scale).transpose(0, 2, 1, 3)


def block(x, w, how):
    shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (y.reshape(shape) for y in jnp.split(norm(x) @ w["qkv"], 3, -1))
    x = x + attend(rotate(q), rotate(k), v, how).reshape(x.shape) @ w["out"]
    gate, up = jnp.split(norm(x) @ w["up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ w["down"]


def loss(w, tokens, how, gather, pin):
    """Sums the losses; `gather` all-gathers weights, `pin` constrains activation shardings."""

    def layer(x, shards):
        return pin(block(x, jax.tree.map(gather, shards), how)), None

    x = pin(gather(w["embedding"])[tokens])
    x, _ = lax.scan(jax.checkpoint(layer), x, {name: w[name] for name in BLOCK})
    logits = (norm(x) @ gather(w["head"])).astype(jnp.float32)
    labels = jnp.roll(tokens, -1, 1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def make_step(how, gather, pin, total):
    def step(w, state, tokens):
        value, gradients = jax.value_and_grad(loss)(w, tokens, how, gather, pin)
        count = 64 * LENGTH
        updates, state = OPTIMIZER.update(jax.tree.map(lambda g: g / count, gradients), state, w)
        return optax.apply_updates(w, updates), state, total(value) / count

    return step


def compile_step(mesh, engine, how, options):
    def unshard(shard):
        return lax.all_gather(shard.astype(jnp.bfloat16), "fsdp", tiled=True)

    def placed(shape, spec):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    w = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    state = jax.eval_shape(OPTIMIZER.init, w)
    specs = optax.tree_map_params(
        OPTIMIZER, lambda _, spec: spec, state, ROWS, transform_non_params=lambda _: P()
    )
    tokens = jax.ShapeDtypeStruct((64, LENGTH), jnp.int32)
    arguments = (
        jax.tree.map(placed, w, ROWS), jax.tree.map(placed, state, specs), placed(tokens, P("fsdp"))
    )  # fmt: skip
    outputs = (ROWS, specs, P())
    if engine == "mapped":
        step = jax.shard_map(
            make_step(how, unshard, lambda x: x, lambda x: lax.psum(x, "fsdp")),
            mesh=mesh, in_specs=(ROWS, specs, P("fsdp")), out_specs=outputs, check_vma=False,
        )  # fmt: skip
    else:
        rows = NamedSharding(mesh, P("fsdp"))
        step = make_step(
            how,
            lambda shard: shard.astype(jnp.bfloat16),
            lambda x: lax.with_sharding_constraint(x, rows),
            lambda x: x,
        )
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), outputs, is_leaf=lambda x: isinstance(x, P)
    )
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    return jitted.lower(*arguments).compile(options)


def main(name, engine, how, *settings):
    where = topology(name)
    mesh = where.mesh((len(where.devices),), ("fsdp",))
    options = {key: {"True": True, "False": False}.get(value, value)
               for key, value in (setting.split("=") for setting in settings)}  # fmt: skip
    start = time.perf_counter()
    compiled = compile_step(mesh, engine, how, options)
    seconds = time.perf_counter() - start
    cost = read(compiled, mesh, where)
    memory, times = cost.memory, cost.without_latency
    network = times.network_inside + times.network_across
    bounds = {"compute": times.compute, "memory": times.memory, "network": network}
    print(f"{name} {engine} {how} {' '.join(settings)}: compiled in {seconds:.0f} s")
    print(f"state {memory.argument_size_in_bytes / 1e9:.3f} GB, "
          f"temporary {memory.temp_size_in_bytes / 1e9:.3f}, peak "
          f"{memory.peak_memory_in_bytes / 1e9:.3f}; {cost.flops / 1e12:.3f} TFLOP")  # fmt: skip
    for (kind, dtype), sent in cost.wire_bytes_by("kind", "dtype").items():
        print(f"  {kind:15} {dtype:5} {sent / 1e9:.3f} GB")
    print(f"wire {cost.wire_bytes / 1e9:.3f} GB in {cost.collective_count} collectives")
    print(f"compute {times.compute * 1e3:.1f} ms, memory {times.memory * 1e3:.1f}, network "
          f"{network * 1e3:.1f}, of that waited for {times.exposed * 1e3:.1f}; "
          f"step {times.step * 1e3:.1f}, bound by {max(bounds, key=bounds.get)}")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
