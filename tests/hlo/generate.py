"""Writes the programs of this folder: small ones, compiled for GPUs and TPUs that are not there.

Needs the extras plan-gpu and plan-tpu: python tests/hlo/generate.py [NAME ...]. What no test reads
is cut away.
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from research_dp.analysis.topologies import topology

BOTH = ("data", "fsdp")
WIDTH, LAYERS = 1024, 4
BF16, F32 = jnp.bfloat16, jnp.float32
ASYNC_TPU = {
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 1,
}


def fsdp(mapped):
    """Loss and gradients of a stack of layers; weights gathered by hand, or by the compiler."""

    def step(weights, x):
        def loss(weights, x):
            def layer(x, w):
                if mapped:
                    w = lax.all_gather(w, BOTH, axis=0, tiled=True)
                x = jnp.tanh(x @ w)
                return x if mapped else lax.with_sharding_constraint(x, P(BOTH)), None

            x, _ = lax.scan(jax.checkpoint(layer), x, weights)
            return jnp.sum(x.astype(F32) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights, x)
        return lax.psum(value, BOTH) if mapped else value, gradients

    return step


def every_kind(x):
    """One collective of each kind, over one axis or both."""
    x = x + lax.psum(jnp.tanh(x), "data")
    x = x + lax.psum(jnp.sin(x).astype(F32), BOTH).astype(BF16)
    x = x + lax.all_gather(jnp.cos(x), "fsdp", tiled=True).reshape(-1, *x.shape).max(0)
    x = x + jnp.tile(lax.psum_scatter(jnp.tanh(x), "data", tiled=True), (4, 1))
    x = x + lax.all_to_all(jnp.sin(x), "fsdp", 0, 0, tiled=True)
    return x + lax.ppermute(jnp.cos(x), "fsdp", [(i, (i + 1) % 4) for i in range(4)])


def attention(implementation):
    def step(q, k, v):
        def loss(q, k, v):
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            ).sum(dtype=F32)

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    return step


def kernel(x):
    """A Pallas kernel that says what it costs."""
    from jax.experimental import pallas as pl

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    cost = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=0)
    return pl.pallas_call(body, out_shape=x, cost_estimate=cost)(x)


def scatter_uneven(x):
    """Rows that do not fill a TPU's tiles: sent padded."""
    return jnp.tanh(lax.psum_scatter(jnp.tanh(x), "fsdp", tiled=True))


STACK = [((LAYERS, WIDTH, WIDTH), BF16, P(None, BOTH))]
HEADS = [((2, 256, 4, 64), BF16, P())] * 3
PROGRAMS = {  # topology, mesh, function, arguments (shape, dtype, spec), out_specs, options
    "gpu_fsdp": (
        "h100:2x8", (2, 8), fsdp(True), [*STACK, ((16 * 512, WIDTH), BF16, P(BOTH))],
        (P(), P(None, BOTH)), {},
    ),
    "gpu_fsdp_jit": (
        "h100:2x8", (2, 8), fsdp(False), [*STACK, ((16 * 512, WIDTH), BF16, P(BOTH))], None, {},
    ),
    "gpu_every_kind": (
        "h100:4x4", (4, 4), every_kind, [((16 * 256, 512), BF16, P(BOTH))], P(BOTH), {},
    ),
    "gpu_attention": ("h100:1x1", (1, 1), attention("cudnn"), HEADS, None, {}),
    "gpu_cublas": (
        "h100:1x1", (1, 1), lambda x, y: x @ y,
        [((256, 512), BF16, P()), ((512, 1024), BF16, P())], None,
        {"xla_gpu_enable_triton_gemm": False},
    ),
    "tpu_fsdp": (
        "v5e-64", (8, 8), fsdp(True), [*STACK, ((64 * 512, WIDTH), BF16, P(BOTH))],
        (P(), P(None, BOTH)), {},
    ),
    "tpu_fsdp_async": (
        "v5e-64", (8, 8), fsdp(True),
        [((LAYERS, 4096, 4096), BF16, P(None, BOTH)), ((64 * 1024, 4096), BF16, P(BOTH))],
        (P(), P(None, BOTH)), ASYNC_TPU,
    ),
    "tpu_every_kind": (
        "v5e-16", (4, 4), every_kind, [((16 * 256, 512), BF16, P(BOTH))], P(BOTH), {},
    ),
    "tpu_scatter_uneven": (
        "v5e-64", (8, 8), scatter_uneven, [((64 * 2000, 1024), BF16, P(BOTH))], P(BOTH), {},
    ),
    "tpu_attention": ("v5e-1", (1, 1), attention("xla"), HEADS, None, {}),
    "tpu_kernel": ("v5e-1", (1, 1), kernel, [((256, 512), F32, P())], None, {}),
    "tpu_slices": (
        "2xv5e-16", (2, 16), lambda x: lax.psum(jnp.tanh(x), BOTH) + lax.psum(x, "data"),
        [((32 * 512, 1024), BF16, P(BOTH))], P(BOTH), {},
    ),
}  # fmt: skip

# Of the compilers' own notes, those that the reader asks for.
_NOTES = (
    r'"known_trip_count":\s*\{[^}]*\}',
    r'"is_sync":\s*\w+',
    r'"async_collective_fusion_config":\s*\{[^}]*\}',
    r'"cost_estimate":\s*\{[^}]*\}',
    r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[[^\]]*\]',
    r'"lhs_contracting_dimensions":\s*\[[^\]]*\]',
)


def shortened(text):
    """The program without the compiler's notes on where things are from and how they are done."""
    lines = []
    for line in text[text.index("\n%" if "\n%" in text else "\nENTRY") :].splitlines():
        name = re.search(r'op_name="([^"]*)"', line)
        head, _, notes = line.partition(", backend_config=")
        head = re.sub(r", metadata=\{[^}]*\}|, sharding=\{[^}]*\}", "", head)
        kept = [found[0] for note in _NOTES if (found := re.search(note, notes))]
        head += f', metadata={{op_name="{name[1]}"}}' if name else ""
        lines.append(head + (f", backend_config={{{', '.join(kept)}}}" if kept else ""))
    return "\n".join(lines) + "\n"


def write(name):
    where, shape, function, arguments, out_specs, options = PROGRAMS[name]
    found = topology(where)
    mesh = found.mesh(shape, BOTH)
    if out_specs is not None:
        specs = tuple(spec for _, _, spec in arguments)
        function = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arguments
    ]
    shardings = None
    if name == "gpu_fsdp_jit":
        shardings = (NamedSharding(mesh, P()), NamedSharding(mesh, P(None, BOTH)))
    with jax.set_mesh(mesh):
        compiled = jax.jit(function, out_shardings=shardings).lower(*shapes).compile(options)
    Path(__file__).with_name(f"{name}.txt").write_text(shortened(compiled.as_text()))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PROGRAMS:
        write(chosen)
