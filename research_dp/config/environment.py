"""What is set up before JAX is used: processes, devices and the compilation cache."""

from __future__ import annotations

import os
import sys
import time
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
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError as error:  # JAX is in use: in a notebook, or after another run
        if len(jax.local_devices(backend="cpu")) != cpu_devices:
            raise UsageError(
                f"cpu_devices = {cpu_devices}, but JAX is in use already, with "
                f"{len(jax.local_devices(backend='cpu'))} CPU devices. Start another process."
            ) from error
    platform = jax.local_devices()[0].platform
    if platform != "cpu":
        raise UsageError(
            f"--cpu_devices={cpu_devices} splits a CPU, but this run uses {platform}. "
            "Leave it out, or set JAX_PLATFORMS=cpu."
        )


def set_up_processes() -> None:
    """Joins the other processes of a run, if JAX_COORDINATOR_ADDRESS says that there are any.

    Raises:
        UsageError: JAX_NUM_PROCESSES or JAX_PROCESS_ID is missing or wrong.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return
    try:
        count, own = (int(os.environ[name]) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"JAX_COORDINATOR_ADDRESS={address} starts a run of several processes, which needs "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID as whole numbers too ({error})."
        ) from error
    if ":" not in address or not 0 <= own < count:
        raise UsageError(
            f"JAX_COORDINATOR_ADDRESS={address}, JAX_NUM_PROCESSES={count}, JAX_PROCESS_ID={own}: "
            "give HOST:PORT, and an id from 0 to the number of processes less one."
        )
    jax.distributed.initialize(address, count, own)


def quieten_tensorflow() -> None:
    """Keeps TensorFlow, which only writes records here, from talking on standard error."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # announced in a line otherwise


def reader_has_gone() -> int:
    """Ends quietly when nobody reads standard output any more; returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # that of a program ended by SIGPIPE


def started() -> float:
    """When this process was started, on the scale of `time.perf_counter()`.

    From Linux's own record, so that Python's start and all imports count; elsewhere now.
    """
    try:
        record = Path("/proc/self/stat").read_text()
        ticks = int(record.rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        age = 0.0
    return time.perf_counter() - age


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
