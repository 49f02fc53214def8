"""Attention and rotary positions: by distance alone, and the same however scores are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research_dp.models.transformer import attention, rotate


def test_rotary_scores_depend_on_distance_alone():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 1, 8)), jnp.float32)
    places = jnp.arange(6)[None]
    near = jnp.einsum("bqhd,bkhd->qk", rotate(x, places), rotate(x, places))
    far = jnp.einsum("bqhd,bkhd->qk", rotate(x, places + 40), rotate(x, places + 40))
    np.testing.assert_allclose(near, far, atol=1e-4)
    assert not np.allclose(near, jnp.einsum("bqhd,bkhd->qk", x, x), atol=0.1)


@pytest.mark.parametrize("with_segments", [False, True])
def test_chunked_attention_is_attention(with_segments):
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(2, 768, 2, 8)), jnp.float32) for _ in range(3)]
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 768)), axis=1), jnp.int32)
    segments = segments if with_segments else None

    def loss(qkv, implementation):
        out = attention(*qkv, segments, implementation=implementation)
        return jnp.sum(jnp.sin(out)), out

    (_, whole), whole_grads = jax.value_and_grad(loss, has_aux=True)(qkv, "xla")
    (_, parts), part_grads = jax.value_and_grad(loss, has_aux=True)(qkv, "chunked")
    np.testing.assert_allclose(parts, whole, atol=2e-5)
    for mine, theirs in zip(part_grads, whole_grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4)
