"""The memory that a compiled program needs on a device."""

from __future__ import annotations

from typing import Any, NamedTuple


class ProgramMemory(NamedTuple):
    """Bytes on a device, as the compiler reports them."""

    temp_bytes: int
    peak_bytes: int
    needed_bytes: int  # the peak, or all arguments, results and temporaries at once

    @classmethod
    def of(cls, program: Any) -> ProgramMemory:
        """The memory of what `lower(...).compile()` returned."""
        memory = program.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        at_once = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
        peak = memory.peak_memory_in_bytes
        return cls(memory.temp_size_in_bytes, peak, max(peak, at_once))
