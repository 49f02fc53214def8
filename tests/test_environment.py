"""What commands set up before JAX is used: which devices it looks for, where programs are kept."""

import os
import subprocess
import sys

import jax
import pytest
from conftest import ROOT

from research_dp.config import environment

DEVICES = """
import jax
from jax._src import hardware_utils
from research_dp.config import environment
hardware_utils.has_visible_nvidia_gpu = lambda: False
hardware_utils.num_available_tpu_chips_and_device_id = lambda: (0, None)
environment.set_up_devices(2)
assert jax.device_count() == 2
"""
PLUGIN = """
from jax._src import config
def initialize():
    if config.jax_platforms.value != "cpu":
        raise RuntimeError("Unable to load cuFFT. Is it installed?")
"""


@pytest.fixture
def settings():
    names = ("jax_platforms", "jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: jax.config.values[name] for name in names}
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)


def test_plugins_for_devices_that_are_not_there_are_left_alone(tmp_path):
    """Those that `plan` compiles with: each says at length that it finds no device."""
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").write_text(PLUGIN)
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        env={**os.environ, "JAX_PLATFORMS": "", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("there", ["a GPU", "a TPU", "a plugin", "a choice"])
def test_devices_that_may_be_there_are_looked_for(monkeypatch, settings, there):
    plugin = environment.importlib.metadata.EntryPoint("other", "jax_plugins.other", "jax_plugins")
    gpu, chips, plugins = there == "a GPU", int(there == "a TPU"), [plugin] * (there == "a plugin")
    hardware = environment.hardware_utils
    monkeypatch.setattr(hardware, "has_visible_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(hardware, "num_available_tpu_chips_and_device_id", lambda: (chips, None))
    monkeypatch.setattr(environment.importlib.metadata, "entry_points", lambda group: plugins)
    chosen = "cpu,cuda" if there == "a choice" else None
    settings.update("jax_platforms", chosen)
    environment.set_up_devices(None)
    assert settings.values["jax_platforms"] == chosen


def test_a_cache_that_cannot_be_written_is_told_and_not_used(settings, tmp_path):
    settings.update("jax_enable_compilation_cache", True)
    settings.update("jax_compilation_cache_dir", str(tmp_path / "a" / "b"))
    assert f"are kept in {tmp_path}/a/b" in environment.set_up_compilation_cache()
    (tmp_path / "file").touch()
    settings.update("jax_compilation_cache_dir", str(tmp_path / "file" / "b"))
    told = environment.set_up_compilation_cache()
    assert f"are not kept: {tmp_path}/file/b cannot be written: Not a directory" in told
    assert not settings.values["jax_enable_compilation_cache"]
