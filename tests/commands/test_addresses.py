"""Where the processes of a run listen: at the address that was given, and at no other."""

import ipaddress
import os
import socket
import subprocess
import sys

import pytest
from jax._src import xla_bridge
from jax._src.lib import _jax

from research_dp.commands import jax_setup
from research_dp.errors import UsageError
from tests.support.programs import pair

PROGRAM = """
import sys, jax
from research_dp.commands import jax_setup
jax_setup.set_up_processes(sys.argv[1], 2, int(sys.argv[2]))
jax.config.update("jax_platforms", "cpu")
jax.block_until_ready(jax.jit(lambda: 0)())
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("ready")
print("ready", flush=True)
sys.stdin.read()
"""


def listening(pid):
    """The addresses at which a process listens."""
    files = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            for words in map(str.split, lines.readlines()[1:]):
                if words[3] == "0A" and f"socket:[{words[9]}]" in files:
                    found.append(_address(words[1].split(":")[0]))
    return found


def _address(text):
    """An address as /proc has it: words of 32 bits, each in the machine's order of bytes."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


def test_processes_on_loopback_listen_nowhere_else():
    with pair(PROGRAM, stdin=subprocess.PIPE) as (address, both):
        for process in both:
            while "ready" not in (line := process.stdout.readline()):
                assert line, "it ended"
        found = [address for process in both for address in listening(process.pid)]
        assert len(found) >= 3, "the coordinator, and a listener of gloo in each"
        assert set(found) == {ipaddress.ip_address("127.0.0.1")}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(address.split(":")[1])), timeout=5)


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("127.0.0.1:12", "127.0.0.1:12"),
        ("[::1]:12", "[::1]:12"),
        ("localhost:12", "localhost:12"),
        ("10.0.0.7:12", "10.0.0.7:12"),
        # It may stand for a loopback address on the machine itself.
        ("host.cluster:12", "[::]:12"),
    ],
)
def test_the_coordinator_is_bound_to_an_address_but_not_to_a_name(monkeypatch, address, bound):
    seen = {}
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    monkeypatch.setattr(jax_setup.jax.distributed, "initialize", lambda **given: seen.update(given))
    monkeypatch.setattr(jax_setup, "_keep_gloo_on_loopback", lambda _: None)
    jax_setup.set_up_processes(address, 2, 1)
    assert seen["coordinator_bind_address"] == bound
    if "cluster" in address:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
        jax_setup.set_up_processes(address, 2, 1)
        assert seen["coordinator_bind_address"] == "0.0.0.0:12"
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:34")
    jax_setup.set_up_processes(address, 2, 1)
    assert seen["coordinator_bind_address"] == "0.0.0.0:34"


@pytest.mark.parametrize(
    ("address", "host"), [("localhost:1", "localhost"), ("[::1]:1", "::1"), ("10.0.0.7:1", None)]
)
def test_collectives_of_the_cpu_stay_on_loopback(monkeypatch, address, host):
    """Not at the address that the machine's name stands for, which may be any, or none."""
    hosts, factories = [], {}
    monkeypatch.setattr(jax_setup.jax.distributed, "initialize", lambda **_: None)
    monkeypatch.setattr(
        _jax, "make_gloo_tcp_collectives", lambda _, hostname: hosts.append(hostname)
    )
    monkeypatch.setattr(xla_bridge, "make_cpu_client", lambda collectives: None)
    monkeypatch.setattr(
        xla_bridge,
        "register_backend_factory",
        lambda name, factory, **_: factories.update({name: factory}),
    )
    jax_setup.set_up_processes(address, 2, 1)
    if host is None:
        assert not factories
    else:
        factories["cpu"]()
        assert hosts == [host]


def test_a_version_of_jax_without_internals_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(jax_setup.jax.distributed, "initialize", lambda **_: None)
    monkeypatch.delattr(xla_bridge, "make_cpu_client")
    jax_setup.set_up_processes("localhost:1", 2, 1)
    warning = "has no attribute 'make_cpu_client': gloo listens at the address of this machine's"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize("dual_stack", [True, False])
def test_a_port_that_is_taken_for_ipv4_is_taken_for_a_name(monkeypatch, dual_stack):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    monkeypatch.setattr(jax_setup.jax.distributed, "initialize", lambda **_: None)
    if not dual_stack:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        bound = rf"\[::\]:{port}" if socket.has_dualstack_ipv6() else rf"0\.0\.0\.0:{port}"
        with pytest.raises(UsageError, match=rf"on {bound}: Address already .* a.*={bound}\.$"):
            jax_setup.set_up_processes(f"host.cluster:{port}", 2, 0)
    jax_setup.set_up_processes(f"host.cluster:{port}", 2, 0)


def test_an_address_where_nothing_can_listen_is_told_with_the_reason(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    with pytest.raises(
        UsageError,
        match=r"cannot listen on 192\.0\.2\.77:1: Cannot assign .*=(\[::\]|0\.0\.0\.0):1",
    ):
        jax_setup.set_up_processes("192.0.2.77:1", 2, 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}: Address already in use\."):
            jax_setup.set_up_processes(f"127.0.0.1:{port}", 2, 0)
