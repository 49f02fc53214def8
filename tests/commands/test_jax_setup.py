"""What commands set up before JAX is used: which devices it looks for, where programs are kept."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import pytest
from jax._src import hardware_utils
from jax.experimental.compilation_cache import compilation_cache

from research_dp.commands import jax_setup
from tests.support.repository import ROOT

DEVICES = """
import jax
from jax._src import hardware_utils
from research_dp.commands import jax_setup
hardware_utils.has_visible_nvidia_gpu = lambda: False
hardware_utils.num_available_tpu_chips_and_device_id = lambda: (0, None)
jax_setup.set_up_devices(2)
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
    names += ("jax_persistent_cache_min_compile_time_secs",)
    before = {name: jax.config.values[name] for name in names}
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


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


@pytest.fixture
def no_devices(monkeypatch):
    """A machine on which JAX finds no GPU, TPU or other plugin."""
    monkeypatch.setattr(hardware_utils, "has_visible_nvidia_gpu", lambda: False)
    monkeypatch.setattr(hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (0, None))
    monkeypatch.setattr(jax_setup, "_plugins", lambda: set())


def test_without_devices_jax_uses_the_cpu(settings, no_devices):
    settings.update("jax_platforms", None)
    jax_setup.set_up_devices(None)
    assert settings.values["jax_platforms"] == "cpu"


def a_gpu(patch):
    patch.setattr(hardware_utils, "has_visible_nvidia_gpu", lambda: True)


def a_tpu(patch):
    patch.setattr(hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (1, None))


def a_plugin(patch):
    patch.setattr(jax_setup, "_plugins", lambda: {"xla_cuda13", "other"})


def a_library(patch):
    patch.setenv("PJRT_NAMES_AND_LIBRARY_PATHS", "other:/opt/other.so")


def another_jax(patch):
    patch.delattr(hardware_utils, "has_visible_nvidia_gpu")


@pytest.mark.parametrize("add", [a_gpu, a_tpu, a_plugin, a_library, another_jax])
def test_devices_that_may_be_there_are_looked_for(monkeypatch, settings, no_devices, capsys, add):
    add(monkeypatch)
    settings.update("jax_platforms", None)
    jax_setup.set_up_devices(None)
    assert settings.values["jax_platforms"] is None
    warning = "has no attribute 'has_visible_nvidia_gpu': it looks for GPUs and TPUs itself.\n"
    assert capsys.readouterr().err.endswith(warning if add is another_jax else "")


def test_a_choice_of_platforms_stays(settings, no_devices):
    settings.update("jax_platforms", "cpu,cuda")
    jax_setup.set_up_devices(None)
    assert settings.values["jax_platforms"] == "cpu,cuda"


def test_plugins_are_found_where_jax_finds_them(monkeypatch, tmp_path):
    """As entry points, and as modules of the namespace `jax_plugins`; none of them is loaded."""
    entry = importlib.metadata.EntryPoint("advertised", "jax_plugins.advertised", "jax_plugins")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    (tmp_path / "jax_plugins" / "by_path").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "by_path" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    assert {"advertised", "by_path"} <= jax_setup._plugins()
    sys.modules.pop("jax_plugins", None)


def test_a_cache_that_cannot_be_written_is_told_and_not_used(settings, tmp_path):
    settings.update("jax_enable_compilation_cache", True)
    settings.update("jax_compilation_cache_dir", str(tmp_path / "a" / "b"))
    assert f"are kept in {tmp_path}/a/b" in jax_setup.set_up_compilation_cache()
    (tmp_path / "file").touch()
    settings.update("jax_compilation_cache_dir", str(tmp_path / "file" / "b"))
    told = jax_setup.set_up_compilation_cache()
    assert f"are not kept: {tmp_path}/file/b cannot be written: Not a directory" in told
    assert not settings.values["jax_enable_compilation_cache"]


def test_a_plan_keeps_no_program_whatever_was_compiled_before_and_after_it(settings, tmp_path):
    """JAX asks once in a process whether there is a cache: a plan may be the first to compile."""
    settings.update("jax_compilation_cache_dir", str(tmp_path))
    settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def kept_of(factor):
        before = len(list(tmp_path.iterdir()))
        jax.jit(lambda x: x * factor).lower(1.0).compile()
        return len(list(tmp_path.iterdir())) - before

    for enabled in (True, False):
        settings.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
        with jax_setup.without_compilation_cache():
            assert not settings.values["jax_enable_compilation_cache"]
            assert kept_of(2 + enabled) == 0
        assert kept_of(4 + enabled) == enabled
        with jax_setup.without_compilation_cache():
            assert kept_of(6 + enabled) == 0
        assert settings.values["jax_enable_compilation_cache"] == enabled
