"""Internals of JAX that have no public name."""

from __future__ import annotations

import pkgutil
import sys
from typing import Any

import jax


def jax_internals(without: str, *names: str) -> list[Any] | None:
    """Attributes of `jax._src`; None, and a warning of what happens `without`: one is missing."""
    try:
        return [pkgutil.resolve_name(f"jax._src.{name}") for name in names]
    except (ImportError, AttributeError) as error:
        print(f"Warning: JAX {jax.__version__}: {error}: {without}.", file=sys.stderr, flush=True)
        return None
