"""Compiles and prints programs, and recognises those that do not fit into device memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_OUT_OF_MEMORY = re.compile(  # as XLA's TPU compiler words it; its GPU compiler never says it
    rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)|Used {_SIZE} of {_SIZE} hbm"
)


class DoesNotFitError(Exception):
    """A program needs more device memory than there is, by the compiler's figures."""

    def __init__(self, needed_bytes: int, limit_bytes: int):
        super().__init__(f"needs {needed_bytes / 1e9:.2f} GB of {limit_bytes / 1e9:.2f}")
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


def compile_to_fit(lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Compiles what `jax.jit(step).lower(*arguments)` gives; `options` are the compiler's.

    Raises:
        DoesNotFitError: A TPU's compiler refuses it. A GPU's compiler never does: compare
            `ProgramCost.peak_bytes` with `Chip.memory_bytes`.
    """
    try:
        return lowered.compile(dict(options) if options else None)
    except jax.errors.JaxRuntimeError as error:
        if sizes := _OUT_OF_MEMORY.search(str(error)):
            groups = [group for group in sizes.groups() if group is not None]
            pairs = zip(groups[::2], groups[1::2], strict=True)
            raise DoesNotFitError(*(int(float(n) * _UNITS[unit]) for n, unit in pairs)) from error
        raise


def dump_options(platform: str, folder: Path) -> dict[str, Any]:
    """Compiler options that write programs into an empty folder, for `text_of`.

    A TPU's compiler can be newer than jaxlib, which then cannot print all of its programs.
    """
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True} if platform == "tpu" else {}


def text_of(program: Any, folder: Path) -> str:
    """A compiled program's text: from the folder of `dump_options`, else as jaxlib prints it."""
    dumps = sorted(folder.glob("*.after_codegen.txt"), key=lambda file: file.stat().st_size)
    return dumps[-1].read_text() if dumps else program.as_text()
