"""Internals of JAX that have no public name, imported where they are needed."""

from __future__ import annotations

import pkgutil
import sys
from typing import Any

import jax


def jax_internals(without: str, *names: str) -> list[Any] | None:
    """Attributes of `jax._src`, e.g. 'hardware_utils.has_visible_nvidia_gpu'; None: one is missing.

    A warning then says what happens `without` them.
    """
    try:
        return [pkgutil.resolve_name(f"jax._src.{name}") for name in names]
    except (ImportError, AttributeError) as error:
        print(f"Warning: JAX {jax.__version__}: {error}: {without}.", file=sys.stderr, flush=True)
        return None
