"""What the processes of a run decide together, so that none is left waiting for the others."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

_LONGEST = 500  # bytes of a message


def first_problem(problem: str | None) -> str | None:
    """What is wrong in any process, with its number; None if nothing is wrong in any.

    A collective: every process calls it, with its own problem or None.
    """
    if jax.process_count() == 1:
        return problem
    text = np.zeros(_LONGEST, np.uint8)
    told = (problem or "").encode()[:_LONGEST]
    text[: len(told)] = list(told)
    texts = multihost_utils.process_allgather(text)
    for process, other in enumerate(np.asarray(texts)):
        message = other.tobytes().rstrip(b"\0").decode(errors="ignore")
        if message:
            return f"process {process}: {message}"
    return None


def of_the_first(number: int) -> int:
    """The number that process 0 has. A collective: every process calls it."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
