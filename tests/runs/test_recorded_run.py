"""A run of an earlier version, killed at step 5 of 10: repeated, restored and continued.

tests/golden/run has its config.gin, its metrics.jsonl of all ten steps, and the checkpoint of step
5. Tests that compare strategies with each other cannot see what changes all of them; this does.
"""

import platform
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support import golden
from tests.support.runs import records, summary

RUN = golden.FOLDER / "run"
MAKE = [
    "--gin_file=runs/digits.gin",
    "--gin_file=models/mlp.gin",
    "--gin_file=strategies/single.gin",
    "--gin_file=options/deterministic.gin",
    "--gin.mlp.widths=(4,)",
    "--gin.mlp.dropout_rate=0.2",
    "--gin.train.batch_size=32",
    "--gin.train.num_steps=10",
    "--gin.train.log_every=4",
    "--gin.train.eval_every=5",
    "--gin.train.checkpoint_every=5",
    "--gin.train.seed=3",
]
# Losses after ten steps on a CPU with other instructions, whose sums are rounded otherwise.
TOLERANCE = 1e-5
REWRITE = f"If older checkpoints and seeds need no longer give this: {golden.command(__file__)}"


def instructions():
    """What this CPU's programs are compiled for: bits are only compared where it is the same."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    wanted = ("avx", "fma", "amx", "asimd", "sve")
    # XLA tunes programs for the model too.
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""
    )
    return [platform.machine(), model, *sorted(flag for flag in flags if flag.startswith(wanted))]


def rewrite(command, folder):
    """Makes the run anew, as a killed one leaves it."""
    done = command(*MAKE, f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    fingerprint = summary(folder)["params_fingerprint"]
    shutil.rmtree(RUN, ignore_errors=True)
    for name in ("config.gin", "metrics.jsonl"):
        RUN.mkdir(exist_ok=True)
        shutil.copy(folder / name, RUN / name)
    shutil.copytree(folder / "checkpoints" / "5", RUN / "checkpoints" / "5")
    for note in RUN.rglob("commit_success.txt"):  # Orbax writes where the run was made
        note.write_text(note.read_text().replace(f"{folder}/", ""))
    restored = train_to(command, copied(folder.parent), 5)["params_fingerprint"]
    found = {"instructions": instructions(), "step 5": restored, "step 10": fingerprint}
    golden.recorded("run_fingerprints", found)


@pytest.fixture(scope="module", autouse=True)
def rewritten(command, tmp_path_factory):
    if golden.updates():
        rewrite(command, tmp_path_factory.mktemp("made") / "run")


def copied(folder):
    return shutil.copytree(RUN, folder / "copied")


def train_to(command, folder, num_steps, config=RUN / "config.gin"):
    flags = [f"--gin_file={config}", f"--gin.train.num_steps={num_steps}"]
    done = command(*flags, f"--workdir={folder}")
    assert done.returncode == 0, f"{done.stderr}\n{REWRITE}"
    return summary(folder)


def is_the_recorded_run(folder):
    found, expected = records(folder), records(RUN)
    assert [(r["split"], r["step"], set(r)) for r in found] == [
        (r["split"], r["step"], set(r)) for r in expected
    ]
    for one, other in zip(found, expected, strict=True):
        for name in set(one) - {"split", "step"}:
            message = f"{name} at step {one['step']} differs. {REWRITE}"
            np.testing.assert_allclose(one[name], other[name], rtol=TOLERANCE, err_msg=message)
    known = golden.recorded("run_fingerprints")
    if known["instructions"] == instructions():
        assert found == expected, REWRITE
        assert summary(folder)["params_fingerprint"] == known["step 10"], REWRITE


def test_a_seed_gives_the_recorded_losses_and_weights(command, tmp_path):
    train_to(command, tmp_path, 10)
    is_the_recorded_run(tmp_path)


def test_a_checkpoint_of_an_earlier_version_has_its_weights(command, tmp_path):
    """Restored and fingerprinted, nothing is computed: the bits are the same on any machine."""
    folder = copied(tmp_path)
    found = train_to(command, folder, 5)
    assert found["params_fingerprint"] == golden.recorded("run_fingerprints")["step 5"], REWRITE
    assert (found["step"], found["examples_seen"]) == (5, 160)


def test_a_killed_run_of_an_earlier_version_continues_as_if_it_had_not_been(command, tmp_path):
    folder = copied(tmp_path)
    train_to(command, folder, 10)
    is_the_recorded_run(folder)
