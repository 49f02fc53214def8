"""Compiles and prints; tells a program that does not fit into device memory from a wrong one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_MESSAGES = (  # of XLA for TPUs; for GPUs it compiles what does not fit
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


class DoesNotFitError(Exception):
    """A program needs more device memory than there is.

    Attributes:
        needed_bytes: What it needs, as far as the compiler says it.
        limit_bytes: What there is.
    """

    def __init__(self, needed_bytes: int, limit_bytes: int):
        super().__init__(f"needs {needed_bytes / 1e9:.2f} GB of {limit_bytes / 1e9:.2f}")
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


def compile_to_fit(lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Compiles a program.

    A TPU's compiler refuses what does not fit; a GPU's does not: compare `ProgramCost.peak_bytes`
    with `Chip.memory_bytes`.

    Args:
        lowered: What `jax.jit(step).lower(*arguments)` gives.
        options: The compiler's.

    Raises:
        DoesNotFitError: It needs more device memory than there is.
    """
    try:
        return lowered.compile(dict(options) if options else None)
    except jax.errors.JaxRuntimeError as error:
        for message in _MESSAGES:
            if found := message.search(str(error)):
                needed, limit = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
                raise DoesNotFitError(needed, limit) from error
        raise


def dumping(platform: str, folder: Path) -> dict[str, Any]:
    """Options by which a compiler writes programs into a folder, for `text_of`.

    A TPU's compiler can be newer than jaxlib, which then cannot print all of its programs.

    Args:
        platform: 'tpu', 'gpu' or 'cpu'.
        folder: An empty one.
    """
    if platform != "tpu":
        return {}
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def text_of(program: Any, folder: Path) -> str:
    """A compiled program's text: as its compiler wrote it into `dumping`'s folder, or jaxlib's.

    Raises:
        jax.errors.JaxRuntimeError: jaxlib cannot print it, and there is no other text.
    """
    written = sorted(folder.glob("*.after_codegen.txt"), key=lambda file: file.stat().st_size)
    return written[-1].read_text() if written else program.as_text()
