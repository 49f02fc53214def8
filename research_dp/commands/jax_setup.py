"""Sets up JAX before its use: processes, devices, the compilation cache; ends processes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import ipaddress
import os
import pkgutil
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from research_dp.distributed.mesh import jax_internals
from research_dp.errors import UsageError, first_line, users_line

_CUDA = {"xla_cuda12", "xla_cuda13"}
_SECONDS_TO_LEAVE = 5.0
_SECONDS_TO_WARN = 20.0
_first_use = [""]  # first: what messages say of the line of a user's code that first used JAX


def _note_first_use(_: Any) -> None:
    if line := users_line(traceback.extract_stack()):
        _first_use.insert(-1, f" (first used at {line}: call JAX in functions)")


_hook = "xla_bridge.register_backend_initialization_hook"
for _register in jax_internals("no message says what used JAX first", _hook) or ():
    _register(_note_first_use)
del _first_use[:-1]  # it is called at once for what is in use already


def set_up_devices(cpu_devices: int | None) -> None:
    """Splits the CPU into devices; UsageError if JAX uses an accelerator, or other devices."""
    if not jax.config.values["jax_platforms"] and not _may_have_accelerators():
        # Plugins for accelerators serve `plan`; without a device they fail in many lines.
        jax.config.update("jax_platforms", "cpu")
    if cpu_devices is None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError as error:  # JAX is in use: in a notebook, or after another run
        present = len(jax.local_devices(backend="cpu"))
        if present != cpu_devices:
            raise UsageError(
                f"cpu_devices = {cpu_devices}, but JAX is in use already, with {present} CPU "
                f"devices{_first_use[0]}. Start another process."
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


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """For a plan: a cached program has no compile time, and some devices can have no cache."""
    name = "jax_enable_compilation_cache"
    before = jax.config.values[name]
    jax.config.update(name, False)
    compilation_cache.reset_cache()  # JAX asks once in a process whether there is a cache
    try:
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()


def quieten_tensorflow() -> None:
    """Stops TensorFlow, which TFDS imports, from writing to standard error."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # otherwise it prints a line about it


def started() -> float:
    """When Linux started this process, before imports, on `time.perf_counter()`'s scale; or now."""
    try:
        record = Path("/proc/self/stat").read_text()
        ticks = int(record.rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        age = 0.0
    return time.perf_counter() - age


def set_up_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_seconds: int = 100,
) -> None:
    """Joins the other processes of a run, if flags or JAX's variables ask for it.

    A `coordinator` is HOST:PORT where process 0 listens, or 'auto': JAX asks the cluster (Slurm,
    Open MPI, Kubernetes, Cloud TPU). A process that sends no heartbeat for so long counts as dead,
    which ends the others. Raises UsageError for what is missing, wrong, or cannot be reached.
    """
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    numbers = {"--num_processes": num_processes, "--process_id": process_id}
    given = " and ".join(name for name, number in numbers.items() if number is not None)
    if not address:
        if given:
            raise UsageError(f"{given} say which process this is: give --coordinator.")
        for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
            if os.environ.get(variable, "1") != "1":  # each task would train the same run
                raise UsageError(
                    f"{variable}={os.environ[variable]}: this is one of several tasks. Give "
                    f"--coordinator=auto to make them one run, or unset {variable} for runs apart."
                )
        return
    if address == "auto":
        if given:
            raise UsageError(f"--coordinator=auto asks the cluster: leave out {given}.")
        _initialize(heartbeat_seconds, "--coordinator=auto")
        return
    count = _number("num_processes", num_processes, address)
    process_id = _number("process_id", process_id, address)
    if not re.fullmatch(r".+:\d+", address) or not 0 <= process_id < count:
        raise UsageError(
            f"--coordinator={address}, --num_processes={count}, --process_id={process_id}: give "
            "HOST:PORT (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), and an id "
            "from 0 to the number of processes less one."
        )
    where = f"process {process_id} of {count}, coordinator {address}"
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        ip = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        ip = None
    # The service has no passwords: whoever reaches it can join, or end, the run. It listens at the
    # address alone; a name may resolve to different addresses on different machines.
    bind_address = os.environ.get(
        "JAX_COORDINATOR_BIND_ADDRESS", _all_interfaces(port) if ip is None else address
    )
    if process_id == 0:
        _check_can_listen(where, bind_address)
    _initialize(
        heartbeat_seconds,
        where,
        coordinator_address=address,
        num_processes=count,
        process_id=process_id,
        coordinator_bind_address=bind_address,
    )
    if ip is not None and ip.is_loopback:
        _keep_gloo_on_loopback(host)


def leave(status: int) -> int:
    """Returns the exit status, or ends a process of several that failed.

    `jax.distributed.shutdown` is a barrier, and the others may wait in a collective for minutes.
    So they get a few seconds to fail too, with the same mistake; then this process exits.
    """
    if status in (0, 143) or not jax.distributed.is_initialized():
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(_SECONDS_TO_LEAVE)
    os._exit(status)


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


def _all_interfaces(port: str) -> str:
    """The wildcard address, for IPv6 too if the machine has it."""
    return f"[::]:{port}" if socket.has_dualstack_ipv6() else f"0.0.0.0:{port}"


def _check_can_listen(where: str, bind_address: str) -> None:
    """Raises an error that says why process 0 cannot listen; JAX's does not."""
    host, _, port = bind_address.rpartition(":")
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port)[0]
        # As JAX's service does: a port that is taken for IPv4 only is taken.
        is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
        socket.create_server(address[:2], family=family, dualstack_ipv6=is_dual).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise UsageError(
            f"{where}: it cannot listen on {bind_address}: {reason}. Give an address of its "
            "machine, and a port that is free. If others reach it by another address, set "
            f"JAX_COORDINATOR_BIND_ADDRESS={_all_interfaces(port)}."
        ) from error


def _keep_gloo_on_loopback(host: str) -> None:
    """Makes the CPU's collectives connect over the coordinator's address.

    The default is the address of the machine's name: open to other machines, or missing.
    """
    if jax.config.values["jax_cpu_collectives_implementation"] != "gloo":
        return
    internals = jax_internals(
        "gloo listens at the address of this machine's name, not on loopback alone",
        "distributed.global_state",
        "lib._jax.make_gloo_tcp_collectives",
        "xla_bridge.make_cpu_client",
        "xla_bridge.register_backend_factory",
    )
    if internals is None:
        return
    service, make_collectives, make_client, register = internals
    register(
        "cpu",
        lambda: make_client(make_collectives(service.client, hostname=host)),
        fail_quietly=False,
    )


def _number(flag: str, given: int | None, address: str) -> int:
    """A flag's value, or that of JAX's variable."""
    variable = f"JAX_{flag.upper()}"
    text = os.environ.get(variable, "") if given is None else str(given)
    if not text.isdecimal():
        raise UsageError(
            f"coordinator {address} starts a run of several processes, which needs --{flag} (or "
            f"{variable}) as a whole number too, not {text!r}."
        )
    return int(text)


def _initialize(heartbeat_seconds: int, where: str, **given: Any) -> None:
    # JAX is silent for minutes, and then aborts the process with a deadline that was exceeded.
    message = (
        f"{where}: still waits for the other processes. Is each one started, with a --process_id "
        "of its own, and does it reach the coordinator's HOST:PORT?"
    )
    printed = {"file": sys.stderr, "flush": True}
    warning = threading.Timer(_SECONDS_TO_WARN, print, (message,), printed)
    warning.daemon = True
    warning.start()
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_seconds, **given)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"{where}: the processes of the run cannot join: {first_line(error)}{_first_use[0]} "
            "Start each with its own --process_id and the same --coordinator=HOST:PORT."
        ) from error
    finally:
        warning.cancel()
