"""What is set up before JAX is used: devices and the compilation cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from research_dp.distributed.errors import UsageError


def set_up_devices(cpu_devices: int | None) -> None:
    """Splits the CPU into devices, where no accelerator is used.

    Raises:
        UsageError: An accelerator is used.
    """
    if cpu_devices is None:
        return
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    platform = jax.devices()[0].platform
    if platform != "cpu":
        raise UsageError(
            f"--cpu_devices={cpu_devices} splits a CPU, but this run uses {platform}. "
            "Leave it out, or set JAX_PLATFORMS=cpu."
        )


def set_up_compilation_cache() -> str:
    """Keeps compiled programs on disk, and returns a line that tells where.

    JAX's own variables decide where there are any: JAX_COMPILATION_CACHE_DIR,
    JAX_ENABLE_COMPILATION_CACHE.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return "Compiled programs are not kept (JAX_ENABLE_COMPILATION_CACHE=false)"
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "research_dp"
        jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
        # Small programs too: many of them make up the time to the first step.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    where = jax.config.values["jax_compilation_cache_dir"]
    return f"Compiled programs are kept in {where} (JAX_COMPILATION_CACHE_DIR)"
