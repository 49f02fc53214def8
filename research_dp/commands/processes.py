"""The processes of a run: how they find each other, where they listen, how one leaves."""

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
from research_dp.errors import UsageError

_SECONDS_TO_LEAVE = 5.0
_SECONDS_TO_TELL = 20.0


@dataclasses.dataclass(frozen=True)
class Processes:
    """How a command finds the other processes of its run; None: as JAX's variables say.

    Attributes:
        coordinator: HOST:PORT where process 0 listens, or 'auto': JAX asks the cluster (Slurm,
            Open MPI, Kubernetes, Cloud TPU).
        num_processes: How many there are.
        process_id: Which one this is, from 0.
        heartbeat_seconds: A process that was not heard of for so long is dead, and ends the others.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_seconds: int = 100


def set_up_processes(processes: Processes) -> None:
    """Joins the other processes of a run, if flags or JAX_COORDINATOR_ADDRESS say that there are.

    Raises:
        UsageError: Something is missing or wrong, or the others cannot be found.
    """
    address = processes.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    alone = [f"--{n}" for n in ("num_processes", "process_id") if getattr(processes, n) is not None]
    if not address and alone:
        raise UsageError(f"{' and '.join(alone)} say which process this is: give --coordinator.")
    if not address:
        _refuse_lone_tasks()
        return
    if address == "auto":
        if alone:
            raise UsageError(
                f"--coordinator=auto asks the cluster: leave out {' and '.join(alone)}."
            )
        _initialize(processes.heartbeat_seconds, "--coordinator=auto")
        return
    count = _number("num_processes", processes.num_processes, "JAX_NUM_PROCESSES", address)
    own = _number("process_id", processes.process_id, "JAX_PROCESS_ID", address)
    if not re.fullmatch(r".+:\d+", address) or not 0 <= own < count:
        raise UsageError(
            f"--coordinator={address}, --num_processes={count}, --process_id={own}: give HOST:PORT "
            "(or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), and an id from 0 to "
            "the number of processes less one."
        )
    where = f"process {own} of {count}, coordinator {address}"
    bound = _bind_address(address)
    if own == 0:
        _check_can_listen(where, bound)
    _initialize(
        processes.heartbeat_seconds,
        where,
        coordinator_address=address,
        num_processes=count,
        process_id=own,
        coordinator_bind_address=bound,
    )
    if _is_loopback(address):
        _keep_gloo_on_loopback(address)


def _bind_address(address: str) -> str:
    """Where process 0 listens: at the address, if it is one, or at all those of its machine.

    The service has no passwords: who reaches it can join, and end, the run. What a host's name
    stands for may differ between machines, so a name is no address, but for localhost.
    """
    host, _, port = address.rpartition(":")
    is_address = host == "localhost" or _ip(host) is not None
    default = address if is_address else _all_interfaces(port)
    return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", default)


def _all_interfaces(port: str) -> str:
    """The address that stands for all of a machine's, of IPv6 too if it has that."""
    return f"[::]:{port}" if socket.has_dualstack_ipv6() else f"0.0.0.0:{port}"


def _check_can_listen(where: str, bound: str) -> None:
    """Says why process 0 cannot listen somewhere; JAX says only that it cannot."""
    host, _, port = bound.rpartition(":")
    try:
        family, *_, place = socket.getaddrinfo(host.strip("[]"), port)[0]
        # As JAX's service binds: a port that is taken for IPv4 alone is taken.
        both = place[0] == "::" and socket.has_dualstack_ipv6()
        socket.create_server(place[:2], family=family, dualstack_ipv6=both).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise UsageError(
            f"{where}: it cannot listen on {bound}: {reason}. Give an address of its machine, and "
            "a port that is free. If others reach it by another address, set "
            f"JAX_COORDINATOR_BIND_ADDRESS={_all_interfaces(port)}."
        ) from error


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _is_loopback(address: str) -> bool:
    """Whether a coordinator's address is one that this machine's own processes alone reach."""
    host = address.rpartition(":")[0]
    found = _ip(host)
    return host == "localhost" if found is None else found.is_loopback


def _keep_gloo_on_loopback(address: str) -> None:
    """Has the CPU's collectives connect over the coordinator's address.

    They listen at the address that the machine's name stands for otherwise: others can reach it, or
    there is none, and the run fails.
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


def _refuse_lone_tasks() -> None:
    """Refuses to be one of several tasks that would each train the whole run by itself."""
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(variable, "1") != "1":
            raise UsageError(
                f"{variable}={os.environ[variable]}: this is one of several tasks. Give "
                f"--coordinator=auto to make them one run, or unset {variable} for runs apart."
            )


def _number(flag: str, given: int | None, variable: str, address: str) -> int:
    """A flag, or the variable in its stead."""
    text = os.environ.get(variable, "") if given is None else str(given)
    if not text.isdecimal():
        raise UsageError(
            f"coordinator {address} starts a run of several processes, which needs --{flag} (or "
            f"{variable}) as a whole number too, not {text!r}."
        )
    return int(text)


def _initialize(heartbeat_seconds: int, where: str, **given: Any) -> None:
    # JAX is silent for minutes, and then aborts the process with a deadline that was exceeded.
    telling = threading.Timer(
        _SECONDS_TO_TELL,
        print,
        (
            f"{where}: still waits for the other processes. Is each one started, and does it reach "
            "the coordinator's HOST:PORT?",
        ),
        {"file": sys.stderr, "flush": True},
    )
    telling.daemon = True
    telling.start()
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_seconds, **given)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"{where}: the processes of the run cannot join: {_first_line(error)} "
            "Start each with its own --process_id and the same --coordinator=HOST:PORT."
        ) from error
    finally:
        telling.cancel()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def leave(status: int) -> int:
    """The exit status of a process that failed; does not wait for processes that did not fail.

    JAX leaves a run together, and waits minutes for processes that may be stuck in a collective
    with this one. So others get a few seconds to fail too, of the same mistake; then this one ends.
    """
    if status in (0, 143) or not jax.distributed.is_initialized():
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    leaving.start()
    leaving.join(_SECONDS_TO_LEAVE)
    os._exit(status)
