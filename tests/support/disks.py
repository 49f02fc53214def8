"""A run whose folder is on a disk of its own, or in this process."""

import subprocess
import sys
from pathlib import Path

import pytest

import research_dp.train
from tests.support.repository import ROOT
from tests.support.runs import WITH_MLP

RUN = [
    *WITH_MLP,
    "--gin.mlp.widths=(256,)",
    "--gin.train.num_steps=20",
    "--gin.train.checkpoint_every=10",
    "--gin.train.eval_every=None",
    "--cpu_devices=8",
]


@pytest.fixture
def train(capfd, data_dir, monkeypatch):
    """Runs the command in this process; returns its exit status and what it said."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))

    def run(folder, *flags):
        capfd.readouterr()
        status = research_dp.train.main([*RUN, f"--workdir={folder}", *flags])
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return status, said.out, said.err

    return run


class Disk:
    """A small disk in memory, mounted in a namespace of its own: that takes no privileges.

    Attributes:
        folder: Where commands see it that are run by `run`.
        seen: Where this process sees it.
    """

    def __init__(self, folder, environment):
        words = ["unshare", "--map-root-user", "--mount", "sh", "-c", "echo ready; cat"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.holder, self.folder = subprocess.Popen(words, **pipes), folder
        self.environment = environment
        assert self.holder.stdout.readline() == "ready\n", "there are no user namespaces"
        self.seen = Path(f"/proc/{self.holder.pid}/root{folder}")

    def run(self, *words):
        enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--mount"]
        return subprocess.run(
            [*enter, "--preserve-credentials", *map(str, words)],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def mount(self, options):
        done = self.run("mount", "-t", "tmpfs", "-o", options, "tmpfs", self.folder)
        assert done.returncode == 0, done.stderr

    def train(self, *flags):
        workdir = f"--workdir={self.folder}"
        return self.run(sys.executable, "-m", "research_dp.train", *RUN, workdir, *flags)


@pytest.fixture
def disk(tmp_path, command):
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", command.environment)
    yield disk
    disk.holder.kill()
    disk.holder.communicate()
