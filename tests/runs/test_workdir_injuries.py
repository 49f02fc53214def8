"""Whatever happens to the files of a run: the right weights at its end, or a refusal in words."""

import collections
import contextlib
import faulthandler
import gc
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from research_dp.runs import checkpoint_files
from research_dp.runs.manifest import Damaged
from tests.support import tiny_run
from tests.support.injuries import injure
from tests.support.run_folders import tree
from tests.support.runs import MLP, records, summary

FIRST, THEN = 6, (8, 10)  # steps of the run that is injured, and of its continuations
NOBODY = 65534
_SECONDS_OF_A_RUN = 120
_REWRITTEN = {".run.lock", ".run.holder", "process_0.txt"}  # also by a run that is refused


@contextlib.contextmanager
def as_nobody():
    """Without root's right to read and write everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture(scope="module")
def place():
    """A folder that root's tests can use without root's rights."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    for below in path.rglob("*"):
        if below.is_dir() and not below.is_symlink():
            below.chmod(0o700)
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def pristine(place):
    """A run after some steps, with files of a user's in it; and the weights later on."""
    folder = place / "pristine"
    right = {}
    for steps in THEN:
        assert tiny_run.outcome(place / f"right{steps}", num_steps=steps) == (0, "")
        right[steps] = summary(place / f"right{steps}")["params_fingerprint"]
    # What libraries import when they fail is imported before root's rights are given up.
    for file in (place / "right8" / "checkpoints" / "8").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert tiny_run.outcome(place / "right8", num_steps=8) == (0, "")
    assert tiny_run.outcome(folder, num_steps=FIRST) == (0, "")
    (folder / "mine").write_text("a user's")
    (folder / "checkpoints" / "mine.txt").write_text("a user's")
    (folder / "tensorboard" / "train" / "mine").mkdir()
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    return folder, right


def trial(pristine, place, chance):
    """Injures a copy of a run, continues it, injures it, continues it.

    Returns:
        A list of (kind of file, injury, exit status); whatever is wrong fails.
    """
    folder, right = pristine
    run, outside = place / "run", place / "outside"
    done = []
    with as_nobody():
        shutil.copytree(folder, run)
        (outside / "moved").mkdir(parents=True)
        (outside / "precious.txt").write_text("precious")
    try:
        for steps in THEN:
            injuries = [injure(run, outside, chance) for _ in range(chance.choice([1, 1, 1, 2]))]
            before, beyond = tree(run), tree(outside)
            faulthandler.dump_traceback_later(_SECONDS_OF_A_RUN, exit=True, file=sys.__stderr__)
            with as_nobody():
                status, message = tiny_run.outcome(run, num_steps=steps)
            faulthandler.cancel_dump_traceback_later()
            said = f"{injuries}: {status} {message}"
            after = tree(run)
            assert tree(outside) == beyond, said
            mine = {p: x for p, x in before.items() if Path(p).name.startswith("mine")}
            assert mine.items() <= after.items(), said
            done += [(*injury, status) for injury in injuries]
            if status:
                assert status in (1, 2) and message and message.count("\n") <= 1, said
                if status == 2:
                    same = [
                        {p: x for p, x in found.items() if Path(p).name not in _REWRITTEN}
                        for found in (before, after)
                    ]
                    assert same[0] == same[1], said
                return done
            assert summary(run)["params_fingerprint"] == right[steps], said
            recorded = [record["step"] for record in records(run, "train")]
            assert recorded == sorted(set(recorded)), said
    finally:
        _remove(run)
        _remove(outside)
    return done


def _remove(folder):
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


def run_trials(pristine, place, seed, count):
    """Counts of statuses by kind of file and by injury."""
    chance = random.Random(seed)
    found = []
    while len(found) < count:
        found += trial(pristine, place, chance)
    for column, title in ((0, "file"), (1, "injury")):
        counts = collections.Counter((row[column], row[2]) for row in found)
        print(f"\n{title:28s}  done  failed  refused")
        for name in sorted({row[column] for row in found}):
            print(f"{name:28s}  {counts[name, 0]:4d}  {counts[name, 1]:6d}  {counts[name, 2]:7d}")
    print(len(found), "injuries", collections.Counter(row[2] for row in found))
    return found


def test_an_injured_run_ends_right_or_is_refused(pristine, place):
    found = run_trials(pristine, place, 0, 12)
    assert {row[2] for row in found} <= {0, 1, 2}


@pytest.mark.slow
def test_every_kind_of_injury_to_every_kind_of_file(pristine, place):
    found = run_trials(pristine, place, 1, 300)
    assert len({row[0] for row in found}) >= 12 and len({row[1] for row in found}) >= 10
    assert sum(row[2] == 0 for row in found) > 100, "hardly any was continued"


# ---- By the command, in processes of their own ----

COMMAND = [
    *MLP,
    "--gin.train.optimizer=@optax.sgd()",
    "--gin.optax.sgd.learning_rate=0.01",
    "--allow_unused",
    "--gin.train.checkpoint_every=10",
    "--gin.train.eval_every=None",
    "--cpu_devices=2",
]


@pytest.mark.exhaustive
def test_the_command_ends_right_or_refuses(command, tmp_path):
    def train(folder, steps):
        return command(*COMMAND, f"--gin.train.num_steps={steps}", f"--workdir={folder}")

    for name, steps in (("begun", 30), ("right", 40)):
        done = train(tmp_path / name, steps)
        assert done.returncode == 0, done.stderr
    (tmp_path / "begun" / "mine").write_text("a user's")
    right = summary(tmp_path / "right")["params_fingerprint"]
    chance, found = random.Random(2), []
    while len(found) < 20:
        run, outside = tmp_path / "run", tmp_path / "outside"
        shutil.copytree(tmp_path / "begun", run)
        (outside / "moved").mkdir(parents=True)
        (outside / "precious.txt").write_text("precious")
        injuries = [injure(run, outside, chance) for _ in range(2)]
        beyond = tree(outside)
        done = train(run, 40)
        said = f"{injuries}: {done.returncode} {done.stdout} {done.stderr}"
        assert "Traceback" not in done.stderr and "Error" not in done.stderr, said
        assert tree(outside) == beyond, said
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
            assert done.returncode in (1, 2) and 1 <= len(errors) <= 2, said
        else:
            assert summary(run)["params_fingerprint"] == right, said
        found += [(*injury, done.returncode) for injury in injuries]
        _remove(run)
        _remove(outside)
    print(collections.Counter(found))
    assert {row[2] for row in found} >= {0, 2}


@pytest.mark.filterwarnings("error")  # as pytest collects what threads and destructors raise
@pytest.mark.parametrize(
    ("names", "tries"),
    [("state/manifest.ocdbt", 4), pytest.param("**/*", 3, marks=pytest.mark.exhaustive)],
)
def test_a_damaged_checkpoint_is_reported_without_tracebacks(tmp_path, capfd, names, tries):
    """Reads that fail at the same time end before their event loop is closed."""
    assert tiny_run.outcome(tmp_path, num_steps=2) == (0, "")
    checkpoint = tmp_path / "checkpoints" / "2"
    paths = sorted(path for path in checkpoint.glob(names) if path.is_file())
    contents = {path: path.read_bytes() for path in paths}
    capfd.readouterr()
    damaged = set()
    for path, content in contents.items():
        for left in (None, b"", content[: len(content) // 2]):
            path.unlink() if left is None else path.write_bytes(left)
            # Which reads are under way when the first one fails is chance.
            for _ in range(tries):
                try:
                    checkpoint_files.verify(checkpoint)
                except Damaged:
                    damaged.add(path.name)
            gc.collect()  # a task that was never awaited would complain now
            path.write_bytes(content)
    assert capfd.readouterr().err == ""
    assert "manifest.ocdbt" in damaged
