"""Eight CPU devices, one folder of prepared data, and no gin left over from another test."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from research_dp.config import load

pytest_plugins = ["no_skips"]
ROOT = Path(__file__).resolve().parents[1]
MODULE = "research_dp.train"

# What tests start inherits this: under nohup a hangup would be ignored, and runs follow that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Commands that run in this process would share the user's programs with tests that need none of
# them: a program for devices that are not here can be stored, but not be read back.
jax.config.update("jax_enable_compilation_cache", False)

# Tests compile much and compute little: XLA:CPU compiles in half the time without LLVM's passes.
# Not so the commands, which tests run as users do: flags are read at the first compilation here.
with pytest.MonkeyPatch.context() as patch:
    flags = os.environ.get("XLA_FLAGS", "")
    patch.setenv("XLA_FLAGS", f"{flags} --xla_backend_optimization_level=0")
    jax.jit(lambda: 0).lower().compile()


def run_bare(code):
    """Runs a program in a process of its own, without the eight devices of these tests."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )


@pytest.fixture(autouse=True)
def clean_gin(monkeypatch):
    monkeypatch.chdir(ROOT)
    load.reset()
    yield
    load.reset()


@pytest.fixture(scope="module", params=["auto", "explicit"])
def any_mesh(request):
    """Eight devices on axis 'data', of each type of axis that users have."""
    if request.param == "explicit":
        return jax.make_mesh((8,), ("data",))
    return jax.sharding.Mesh(jax.devices(), ("data",))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Where TFDS data sets are prepared for the tests."""
    return tmp_path_factory.mktemp("tfds")


_running = []  # what `command` started and left running


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Ends what a test started, with the processes that those started, however the test ends."""
    before = len(_running)
    yield
    while len(_running) > before:
        process = _running.pop()
        if process.poll() is None:
            process.terminate()  # a launcher ends the processes that it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:  # closes its pipe, and waits for it
            pass


@pytest.fixture(scope="session")
def command(data_dir, tmp_path_factory):
    """Runs `python -m research_dp.train` with these flags; returns the finished process.

    With `start_only` it returns the running one, in a process group of its own, which ends with
    the test.
    """
    environment = {
        **os.environ,
        "TFDS_DATA_DIR": str(data_dir),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")),
        "PYTHONPATH": str(ROOT),
    }

    def run(*flags, start_only=False, cwd=ROOT, module=MODULE, tool=None, timeout=300, **extra):
        program = [ROOT / "tools" / tool] if tool else ["-m", module]
        words = [sys.executable, *map(str, [*program, *flags])]
        options = {"cwd": cwd, "env": {**environment, **extra}, "text": True}
        if start_only:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            _running.append(subprocess.Popen(words, start_new_session=True, **options))
            return _running[-1]
        return subprocess.run(words, capture_output=True, timeout=timeout, **options)

    run.environment = environment
    return run


def stems():
    """Names of the shipped strategies."""
    return sorted(path.stem for path in (ROOT / "gin" / "strategies").glob("*.gin"))
