"""Installed from a wheel, away from the clone, the shipped gin files are found by short names."""

import os
import subprocess
import sys
import time

import pytest

import research_dp
from tests.support.repository import ROOT


@pytest.mark.slow
def test_a_wheel_has_the_gin_files(tmp_path, data_dir):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.split():
        if (ROOT / name).exists() and name.startswith(("research_dp/", "gin/", "setup", "README")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run([*pip, *build], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    templates = {path.name for path in (ROOT / "research_dp/templates").iterdir()}
    assert {path.name for path in (installed / "research_dp/templates").iterdir()} == templates
    words = ["-m", "research_dp.train", "--gin_file=runs/digits.gin", "--dry_run"]
    done = subprocess.run(
        [sys.executable, *words, "--gin_file=gin/strategies/zero1.gin"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed), "TFDS_DATA_DIR": str(data_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "data_parallel.name = 'zero1'" in done.stdout
    assert "# runs/digits.gin:11" in done.stdout

    def run(*words):
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
        path = {"PYTHONPATH": str(installed)}
        return subprocess.run([program, *words], env={**os.environ, **path}, **options).stdout

    program = installed / "bin" / "research-dp"
    assert run("--version").startswith(f"research-dp {research_dp.__version__} (jax ")
    assert "\n  strategies/fsdp.gin " in run("list", "strategies")
    assert "research-dp launch -n 2 -- --gin_file=runs/digits.gin" in run("launch", "--help")
    start = time.monotonic()
    run("--help")
    assert time.monotonic() - start < 2, "it imports what only a command needs"
