"""Random keys: functions of the seed, the step and an example's place, never of a device."""

from __future__ import annotations

import jax

# Each purpose has a root of its own, so that no key is drawn from twice.
_INIT, _EXAMPLES = 0, 1


def init_key(seed: int) -> jax.Array:
    """The key of a run's initial parameters."""
    return jax.random.fold_in(jax.random.key(seed), _INIT)


def example_keys(seed: int, step: jax.Array, position: jax.Array) -> jax.Array:
    """One key an example, (B,), from the seed, the step and its places (B,) in the batch."""
    root = jax.random.fold_in(jax.random.key(seed), _EXAMPLES)
    step_key = jax.random.fold_in(root, step)
    return jax.vmap(lambda place: jax.random.fold_in(step_key, place))(position)
