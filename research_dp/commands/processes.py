"""Connects the processes of a run, and ends one of them without waiting for the others."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import socket
import sys
import threading
from typing import Any

import jax

from research_dp.distributed.jax_internals import jax_internals
from research_dp.errors import UsageError, first_line

_SECONDS_TO_LEAVE = 5.0
_SECONDS_TO_WARN = 20.0


@dataclasses.dataclass(frozen=True)
class Processes:
    """How a command finds the other processes of its run; None: JAX's variables decide.

    Attributes:
        coordinator: HOST:PORT where process 0 listens, or 'auto': JAX asks the cluster (Slurm,
            Open MPI, Kubernetes, Cloud TPU).
        num_processes: How many there are.
        process_id: Which one this is, from 0.
        heartbeat_seconds: After so long without a heartbeat a process counts as dead, which ends
            the others.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_seconds: int = 100


def set_up_processes(processes: Processes) -> None:
    """Joins the other processes of a run, if flags or JAX_COORDINATOR_ADDRESS ask for it.

    Raises:
        UsageError: Something is missing or wrong, or the others cannot be found.
    """
    address = processes.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given = [f"--{n}" for n in ("num_processes", "process_id") if getattr(processes, n) is not None]
    if not address and given:
        raise UsageError(f"{' and '.join(given)} say which process this is: give --coordinator.")
    if not address:
        _refuse_separate_tasks()
        return
    if address == "auto":
        if given:
            raise UsageError(
                f"--coordinator=auto asks the cluster: leave out {' and '.join(given)}."
            )
        _initialize(processes.heartbeat_seconds, "--coordinator=auto")
        return
    count = _number("num_processes", processes.num_processes, "JAX_NUM_PROCESSES", address)
    process_id = _number("process_id", processes.process_id, "JAX_PROCESS_ID", address)
    if not re.fullmatch(r".+:\d+", address) or not 0 <= process_id < count:
        raise UsageError(
            f"--coordinator={address}, --num_processes={count}, --process_id={process_id}: give "
            "HOST:PORT (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), and an id "
            "from 0 to the number of processes less one."
        )
    where = f"process {process_id} of {count}, coordinator {address}"
    bind_address = _bind_address(address)
    if process_id == 0:
        _check_can_listen(where, bind_address)
    _initialize(
        processes.heartbeat_seconds,
        where,
        coordinator_address=address,
        num_processes=count,
        process_id=process_id,
        coordinator_bind_address=bind_address,
    )
    if _is_loopback(address):
        _keep_gloo_on_loopback(address)


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


def _bind_address(address: str) -> str:
    """Where process 0 listens: at the coordinator's IP address, or on all interfaces for a name.

    The service has no passwords: whoever reaches it can join, or end, the run. A name may resolve
    to different addresses on different machines, so only localhost counts as an address.
    """
    host, _, port = address.rpartition(":")
    is_address = host == "localhost" or _ip(host) is not None
    default = address if is_address else _all_interfaces(port)
    return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", default)


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


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach a coordinator's address."""
    host = address.rpartition(":")[0]
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def _keep_gloo_on_loopback(address: str) -> None:
    """Makes the CPU's collectives connect over the coordinator's address.

    Their default is the address of the machine's name: other machines can reach it, or there is
    none and the run fails.
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
    host = address.rpartition(":")[0].strip("[]")
    register(
        "cpu",
        lambda: make_client(make_collectives(service.client, hostname=host)),
        fail_quietly=False,
    )


def _refuse_separate_tasks() -> None:
    """Refuses to be one of several tasks that would each train the same run."""
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(variable, "1") != "1":
            raise UsageError(
                f"{variable}={os.environ[variable]}: this is one of several tasks. Give "
                f"--coordinator=auto to make them one run, or unset {variable} for runs apart."
            )


def _number(flag: str, given: int | None, variable: str, address: str) -> int:
    """A flag's value, or that of the variable."""
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
        f"{where}: still waits for the other processes. Is each one started, and does it reach "
        "the coordinator's HOST:PORT?"
    )
    printed = {"file": sys.stderr, "flush": True}
    warning = threading.Timer(_SECONDS_TO_WARN, print, (message,), printed)
    warning.daemon = True
    warning.start()
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_seconds, **given)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"{where}: the processes of the run cannot join: {first_line(error)} "
            "Start each with its own --process_id and the same --coordinator=HOST:PORT."
        ) from error
    finally:
        warning.cancel()
