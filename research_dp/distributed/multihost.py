"""Agreement between the processes of a run by collectives, and access to internals of JAX."""

from __future__ import annotations

import pkgutil
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def texts_of_all(local: str) -> list[str]:
    """The text of each process, in their order."""
    if jax.process_count() == 1:
        return [local]
    # A path may not be encodable; a single process must not fail here.
    text = np.frombuffer(local.encode(errors="backslashreplace"), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: text.size] = text
    gathered = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


def first_problem(problem: str | None) -> str | None:
    """The problem of the first process that has one, with its number; None: none has."""
    if jax.process_count() == 1:
        return problem
    texts = enumerate(texts_of_all(problem or ""))
    return next((f"process {process}: {text}" for process, text in texts if text), None)


def of_the_first(number: int) -> int:
    """The integer of process 0, of any size."""
    return int(texts_of_all(str(number))[0])


def jax_internals(without: str, *names: str) -> list[Any] | None:
    """Attributes of `jax._src`; None, and a warning of what happens `without`: one is missing."""
    try:
        return [pkgutil.resolve_name(f"jax._src.{name}") for name in names]
    except (ImportError, AttributeError) as error:
        print(f"Warning: JAX {jax.__version__}: {error}: {without}.", file=sys.stderr, flush=True)
        return None
