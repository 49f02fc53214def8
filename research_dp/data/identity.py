"""The identity of a split: its size, and a hash of a few of its examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from research_dp.types import SplitIdentity

NUM_HASHED = 8  # examples of a split


def split_identity(size: int, examples: Iterable[Any]) -> SplitIdentity:
    """The identity of a split of this size, by some of its examples."""
    digest = hashlib.sha256()
    for example in examples:
        _update(digest, example)
    return SplitIdentity(examples=size, digest=digest.hexdigest()[:16])


def _update(digest: Any, value: Any) -> None:
    """Hashes a feature, or a dict of features, independently of the reader's Python types."""
    if isinstance(value, np.ndarray) and value.dtype == np.object_:
        value = value.ravel().tolist()
    if isinstance(value, Mapping):
        for name, inner in sorted(value.items()):
            digest.update(name.encode())
            _update(digest, inner)
    elif isinstance(value, bytes | str):
        text = value.encode() if isinstance(value, str) else value
        digest.update(len(text).to_bytes(8, "little") + text)
    elif isinstance(value, list | tuple):
        digest.update(len(value).to_bytes(8, "little"))
        for inner in value:
            _update(digest, inner)
    elif (array := np.asarray(value)).dtype != np.object_:  # not a nested data set
        # Readers differ in dtypes: all integers are hashed as int64, all floats as float64.
        wide = np.float64 if jnp.issubdtype(array.dtype, jnp.floating) else np.int64
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array, wide).tobytes())
