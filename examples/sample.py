"""Samples text from a run of gin/runs/lm_stdlib.gin: `python examples/sample.py WORKDIR PROMPT`."""

import sys

import jax
import jax.numpy as jnp

import research_dp

LENGTH = 256  # bytes that the model was trained on at once
TEMPERATURE = 0.5  # 0: always the likeliest byte


def sample(model, params, prompt, key):
    """Yields bytes that continue a prompt (bytes), until LENGTH of both are there."""

    @jax.jit
    def next_byte(tokens, length, key):
        logits = model.apply(params, tokens[None])[0, length - 1]
        if TEMPERATURE == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / TEMPERATURE)

    # Attention is causal: what is after the last byte changes nothing.
    tokens = jnp.zeros(LENGTH, jnp.int32).at[: len(prompt)].set(jnp.array(list(prompt)))
    for length in range(len(prompt), LENGTH):
        value = next_byte(tokens, length, jax.random.fold_in(key, length))
        tokens = tokens.at[length].set(value)
        yield int(value)


def main(workdir, prompt):
    """Prints a prompt and its continuation."""
    model, params = research_dp.load(workdir)
    continuation = bytes(sample(model, params, prompt.encode(), jax.random.key(0)))
    print(prompt + continuation.decode(errors="replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
