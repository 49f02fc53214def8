"""Sets up what must be ready before JAX is used: devices and the compilation cache."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import tempfile
import time
from pathlib import Path

import jax

from research_dp.distributed.jax_internals import jax_internals
from research_dp.errors import UsageError

_CUDA = {"xla_cuda12", "xla_cuda13"}


def set_up_devices(cpu_devices: int | None) -> None:
    """Splits the CPU into devices, where no accelerator is used.

    Raises:
        UsageError: An accelerator is used, or JAX has other devices already.
    """
    if not jax.config.values["jax_platforms"] and not _may_have_accelerators():
        # Plugins for accelerators are installed for `plan`; without a device they fail in many
        # lines.
        jax.config.update("jax_platforms", "cpu")
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


def set_up_compilation_cache() -> str:
    """Stores compiled programs on disk; returns a line that says where.

    JAX's own variables take precedence: JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return "Compiled programs are not kept (JAX_ENABLE_COMPILATION_CACHE=false)"
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "research_dp"
        jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
        # Cache small programs too: many of them make up the time to the first step.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    folder = jax.config.values["jax_compilation_cache_dir"]
    if "://" not in folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            jax.config.update("jax_enable_compilation_cache", False)
            return (
                f"Compiled programs are not kept: {folder} cannot be written: {error.strerror} "
                "(JAX_COMPILATION_CACHE_DIR)"
            )
    return f"Compiled programs are kept in {folder} (JAX_COMPILATION_CACHE_DIR)"


def quieten_tensorflow() -> None:
    """Stops TensorFlow, which TFDS imports, from writing to standard error."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # otherwise it prints a line about it


def started() -> float:
    """When this process was started, on the scale of `time.perf_counter()`.

    Linux records the start, so that Python's own start and all imports count; elsewhere: now.
    """
    try:
        record = Path("/proc/self/stat").read_text()
        ticks = int(record.rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        age = 0.0
    return time.perf_counter() - age


def _may_have_accelerators() -> bool:
    """Whether JAX's own tests find a GPU or TPU, or there is a plugin for something else."""
    if os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS") or _plugins() - _CUDA:
        return True
    tests = jax_internals(
        "it looks for GPUs and TPUs itself",
        "hardware_utils.has_visible_nvidia_gpu",
        "hardware_utils.num_available_tpu_chips_and_device_id",
        "cloud_tpu_init.jax_force_tpu_init",
    )
    if tests is None:
        return True
    has_gpu, tpu_chips, is_forced = tests
    return has_gpu() or tpu_chips()[0] > 0 or is_forced()


def _plugins() -> set[str]:
    """Names of the plugins that JAX would load: entry points, and modules of `jax_plugins`."""
    names = {plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")}
    try:
        package = importlib.import_module("jax_plugins")  # a namespace package, so loads no plugin
    except ImportError:
        return names
    return names | {module.name for module in pkgutil.iter_modules(package.__path__)}
