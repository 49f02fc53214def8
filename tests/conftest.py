"""Eight CPU devices, one folder of prepared data and programs, and no gin of another test."""

import collections
import os
import signal
import subprocess
import sys

import jax
import pytest

from research_dp.commands.main import main_of
from research_dp.config import load
from tests.support import left_running, programs
from tests.support.compilers import COMPILES_FAST
from tests.support.repository import ROOT

pytest_plugins = ["tests.support.no_skips", "tests.support.browser"]
MODULE = "research_dp.train"

# What tests start inherits this: under nohup a hangup would be ignored, and runs follow that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# pytest-xdist exports the width of its terminal, at which commands in a pipe would lay out tables.
os.environ.pop("COLUMNS", None)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Commands that run in this process would share the user's programs with tests that need none of
# them: a program for devices that are not here can be stored, but not be read back.
jax.config.update("jax_enable_compilation_cache", False)

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {COMPILES_FAST}")
    jax.jit(lambda: 0).lower().compile()


def pytest_collection_modifyitems(items):
    """Has files that take long start first: with `-n 2` no process waits for the other's last."""
    work = collections.Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        compiles = "skipif" in marks  # for devices that are not here
        starts = "command" in item.fixturenames
        work[item.path] += 30 if compiles else 10 if starts else 3 if "slow" in marks else 1
    items.sort(key=lambda item: -work[item.path])


def pytest_terminal_summary(terminalreporter, config):
    """With `--durations`: where the time goes, by file."""
    seconds = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    count = config.getoption("durations")
    if count is not None and seconds:
        terminalreporter.section(f"{sum(seconds.values()):,.0f} seconds of tests, by file")
        for file, time in seconds.most_common(count or None):
            terminalreporter.line(f"{time:7.1f}s {file}")


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
def mesh():
    """Eight devices on axis 'data'."""
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(scope="session")
def session_dir(request, tmp_path_factory):
    """A folder of this session, which its pytest-xdist workers share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


@pytest.fixture(scope="session")
def data_dir(session_dir):
    """Where TFDS data sets are prepared for the tests: by the first process that needs one."""
    folder = session_dir / "tfds"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(session_dir):
    """Where what tests start keeps its programs, also those that compile quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(session_dir / "xla"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Ends what a test started, with the processes that those started, however the test ends."""
    with left_running.ended():
        yield


@pytest.fixture(scope="session")
def command(data_dir, compilation_cache):
    """Runs `python -m research_dp.train` with these flags; returns the finished process.

    With `start_only` it returns the running one, in a process group of its own, which ends with
    the test.
    """
    environment = programs.environment(TFDS_DATA_DIR=str(data_dir), JAX_PLATFORMS="cpu")

    def run(*flags, start_only=False, cwd=ROOT, module=MODULE, timeout=300, **extra):
        words = [sys.executable, "-m", module, *map(str, flags)]
        options = {"cwd": cwd, "env": {**environment, **extra}, "text": True}
        if start_only:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            left_running.started.append(subprocess.Popen(words, start_new_session=True, **options))
            return left_running.started[-1]
        return subprocess.run(words, capture_output=True, timeout=timeout, **options)

    run.environment = environment
    return run


@pytest.fixture
def main(data_dir, monkeypatch, capfd):
    """Runs a command with these flags here, as `command` does in a process of its own.

    It has eight devices: `--cpu_devices` can be 8 alone.
    """
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))  # the command sets them

    def run(*flags, name="train"):
        capfd.readouterr()
        try:
            status = main_of(name)([str(flag) for flag in flags])
        except SystemExit as ended:  # a flag that there is not
            status = ended.code
        return subprocess.CompletedProcess(flags, status, *capfd.readouterr())

    return run
