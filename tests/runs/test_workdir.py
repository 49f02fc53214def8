"""The files of a run: literal paths, nothing followed, nothing lost, nothing deleted unasked."""

import contextlib
import dataclasses
import errno
import itertools
import math
import os
import re
import shutil
import stat
import struct
import sys
import time
import types

import gin
import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2

import research_dp
from research_dp.errors import UsageError
from research_dp.runs import checkpoint_files, files
from research_dp.runs.checkpoint import Checkpoints
from research_dp.runs.checkpoint_files import steps_in
from research_dp.runs.flight_recorder import last_notes
from research_dp.runs.manifest import Damaged
from research_dp.runs.records import truncate_records
from research_dp.training import throughput
from research_dp.training.metric_log import MetricLog, ProgressBar
from tests.support import tiny_run
from tests.support.disks import disk as disk
from tests.support.run_folders import tree
from tests.support.runs import records, summary

SPECIAL = "a[1]*?{b} **#%20~"  # what globs, URLs and shells read something into
BY_ALL_RUNS = (".run.lock", ".run.holder", "flight/process_0.txt")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of 6 steps, and the weights of one of 8."""
    folder = tmp_path_factory.mktemp("run")
    assert tiny_run.outcome(folder / "six", num_steps=6) == (0, "")
    assert tiny_run.outcome(folder / "eight", num_steps=8) == (0, "")
    return folder / "six", summary(folder / "eight")["params_fingerprint"]


@pytest.fixture
def run(ended, tmp_path):
    return shutil.copytree(ended[0], tmp_path / "run")


def continues(run, ended, **options):
    """Whether it ends at step 8 with the right weights and all records."""
    assert tiny_run.outcome(run, num_steps=8, **options) == (0, "")
    assert summary(run)["params_fingerprint"] == ended[1]


# ---- Paths ----


def test_names_that_look_like_patterns_are_names(ended, tmp_path):
    folder = tmp_path / SPECIAL
    assert tiny_run.outcome(folder, num_steps=6) == (0, "")
    assert [
        row.damaged for row in checkpoint_files.overview(folder / "checkpoints", verified=True)
    ] == [False] * 3
    continues(folder, ended)
    assert os.listdir(tmp_path) == [SPECIAL]


@pytest.mark.parametrize(
    ("name", "expected"),
    [(b"\xff\xfe", "is not UTF-8"), (b"a\\b", "has a backslash, which TensorStore takes for")],
)
@pytest.mark.parametrize("linked", [False, True])
def test_paths_that_checkpoints_cannot_have_are_refused_at_the_start(
    tmp_path, name, expected, linked
):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    if linked:
        os.mkdir(folder)
        os.symlink(folder, tmp_path / "link")
        folder = str(tmp_path / "link")
    before = tree(tmp_path)
    status, message = tiny_run.outcome(folder)
    assert status == 2 and expected in message and message.isprintable()
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("workdir", "expected"),
    [
        ("~no_such_user/run", "--workdir=~no_such_user/run: ~no_such_user is no user's home"),
        ("a\0b", "--workdir=a\\x00b has a null character"),
    ],
)
def test_paths_that_no_folder_can_have_are_refused(tmp_path, monkeypatch, workdir, expected):
    monkeypatch.chdir(tmp_path)
    status, message = tiny_run.outcome(workdir)
    assert status == 2 and message.startswith(expected)
    assert os.listdir(tmp_path) == []
    assert tiny_run.outcome(f"./{SPECIAL.replace('a', '~')}", num_steps=2) == (0, "")


# ---- Records without checkpoints ----


def _lost(run):
    (run / "checkpoints").rename(run.parent / "elsewhere")


def _unmounted(run):
    _lost(run)
    (run / "checkpoints").symlink_to(run.parent / "no store")


def _mounted_empty(run):
    _lost(run)
    (run.parent / "store").mkdir()
    (run / "checkpoints").symlink_to(run.parent / "store")


def _emptied(run):
    shutil.move(run / "checkpoints", run.parent / "elsewhere")
    (run / "checkpoints").mkdir()


@pytest.mark.parametrize("lose", [_lost, _unmounted, _mounted_empty, _emptied])
def test_records_without_checkpoints_are_a_question(run, ended, lose):
    lose(run)
    before = tree(run.parent)
    status, message = tiny_run.outcome(run, num_steps=8)
    assert status == 2 and "put back" in message.lower(), message
    after = tree(run.parent)
    after.pop("run/checkpoints/" + files.NOTHING_SAVED, None)
    strip = [f"run/{name}" for name in BY_ALL_RUNS]
    assert {p: x for p, x in before.items() if p not in strip} == {
        p: x for p, x in after.items() if p not in strip
    }
    if (run / "checkpoints").is_symlink():
        (run / "checkpoints").unlink()
    elif (run / "checkpoints").exists():
        (run / "checkpoints").rmdir()
    (run.parent / "elsewhere").rename(run / "checkpoints")
    continues(run, ended)


def _ends_at(step):
    """Data that fails at a step, as a run that is killed there."""

    def train(order):
        for number, batch in enumerate(tiny_run.DATA.train(order), order.first_step + 1):
            if number == step:
                raise RuntimeError("killed")
            yield batch

    return dataclasses.replace(tiny_run.DATA, train=train)


def test_a_run_that_ended_before_its_first_save_begins_again(ended, tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        tiny_run.train(tmp_path, num_steps=48, data=_ends_at(40), checkpoint_every=None)
    assert records(tmp_path)
    # Not as another run: its records would be lost.
    gin.parse_config("shard_params.min_weight_size = 9")
    status, message = tiny_run.outcome(tmp_path, num_steps=8)
    assert status == 2
    expected = f"{tmp_path} has records of a run (metrics.jsonl) that saved nothing and had another"
    assert message.startswith(expected) and "ut back" not in message
    gin.clear_config()
    continues(tmp_path, ended)
    assert not (tmp_path / "checkpoints" / files.NOTHING_SAVED).exists()
    steps = [record["step"] for record in records(tmp_path, "train")]
    assert steps == [2, 4, 6, 8]
    assert [step for step, _ in events(tmp_path / "tensorboard" / "train")] == steps
    assert [step for step, _ in events(tmp_path / "tensorboard" / "eval")] == [4, 8]


# ---- Records ----


def metric_log(say):
    """A log of a new run, which prints no metrics."""
    console = types.SimpleNamespace(say=say, metrics=lambda *_: None)
    return MetricLog(None, throughput.Throughput(1), console)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\n",
        b"[]\n",
        b"3\n",
        b"{}\n",
        b'{"split": "train", "step": "2"}\n',
        b'{"split": "../x", "step": 2}\n',
        b'{"split": "train", "step": 2, "loss": [1]}\n',
        b'{"split": "train", "step": 2, "loss": 1e999}\n',
        b'{"split": "train", "step": -1, "loss": 1}\n',
        b'{"split": "train", "step": -100000000000000000000000, "loss": 1}\n',
        b'{"split": "train", "step": 9223372036854775808, "loss": 1}\n',
        b'{"split": "train", "step": 2, "\\ud800": 1}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_lines_that_are_no_records_are_left_out_and_kept_aside(tmp_path, line):
    good = b'{"split": "train", "step": 2, "loss": null}\n'
    file, said = tmp_path / "metrics.jsonl", []
    file.write_bytes(good + line + good + b'{"split": "tra')
    written = metric_log(said.append)
    written.open(tmp_path, 2**70, evaluates_again=False)
    written.close()
    kept = truncate_records(file, 2**70, evaluates_again=False, say=said.append)
    assert kept == [{"split": "train", "step": 2, "loss": None}] * 2
    assert file.read_bytes() == good * 2
    assert (
        tmp_path / "metrics.jsonl.damaged"
    ).read_bytes() == good + line + good + b'{"split": "tra'
    assert len(said) == 1 and "1 of 3 lines of" in said[0]
    shown = events(tmp_path / "tensorboard" / "train")
    assert [math.isnan(values["loss"]) for _, values in shown] == [True, True]


def test_half_of_the_last_line_is_no_damage(tmp_path):
    file, said = tmp_path / "metrics.jsonl", []
    file.write_bytes(b'{"split": "train", "step": 2}\n{"split": "tra')
    truncate_records(file, 2, evaluates_again=False, say=said.append)
    assert not said and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_records_that_are_missing_are_reported(run, ended, capsys):
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[2:]))
    events = set((run / "tensorboard" / "train").iterdir())
    continues(run, ended)
    expected = "2 of the 3 training records that were written before step 6 was saved are not in"
    assert expected in capsys.readouterr().out
    assert events < set((run / "tensorboard" / "train").iterdir())
    # The next checkpoint counts what there is.
    assert tiny_run.outcome(run, num_steps=10) == (0, "")
    assert "are not in" not in capsys.readouterr().out


def test_records_are_on_the_disk_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    synced, sizes = {}, []
    fsync, save = os.fsync, Checkpoints.save

    def noted(number):
        synced[os.readlink(f"/proc/self/fd/{number}")] = os.fstat(number).st_size
        fsync(number)

    def checked(self, *args):
        file = tmp_path / "metrics.jsonl"
        sizes.append((synced.get(str(file)), file.stat().st_size))
        save(self, *args)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Checkpoints, "save", checked)
    assert tiny_run.outcome(tmp_path) == (0, "")
    assert len(sizes) >= 4 and all(before == now > 0 for before, now in sizes)
    assert str(tmp_path) in synced
    assert any(path.startswith(f"{tmp_path}/.summary.json.") for path in synced)


def test_a_run_whose_last_save_fails_has_no_summary(tmp_path, monkeypatch):
    def fails(folder):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_files, "fsync_checkpoint", fails)
    assert tiny_run.outcome(tmp_path, checkpoint_every=None)[0] == 1
    assert not (tmp_path / files.SUMMARY).exists()


# ---- TensorBoard ----


def events(folder):
    """(step, scalars) of the event files of a split, in order."""
    found = []
    for file in sorted(folder.glob("events.*")):
        content = file.read_bytes()
        while content:
            size = struct.unpack("<Q", content[:8])[0]
            event = event_pb2.Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            if event.HasField("summary"):
                values = {value.tag: value.simple_value for value in event.summary.value}
                found.append((event.step, values))
    return found


def test_tensorboard_has_all_records_when_done_is_said(tmp_path, monkeypatch):
    seen = {}

    def say(self, text):
        if text.startswith("Done"):  # a signal may end the process from now on
            seen.update({split: events(tmp_path / "tensorboard" / split) for split in files.SPLITS})

    monkeypatch.setattr(ProgressBar, "say", say)
    assert tiny_run.outcome(tmp_path, num_steps=6) == (0, "")
    assert tiny_run.outcome(tmp_path, num_steps=8) == (0, "")
    for split in files.SPLITS:
        wanted = records(tmp_path, split)
        assert [step for step, _ in seen[split]] == [record["step"] for record in wanted]
        for (_, values), record in zip(seen[split], wanted, strict=True):
            assert values["loss"] == pytest.approx(record["loss"])
        assert len(list((tmp_path / "tensorboard" / split).iterdir())) == 1


def test_events_after_the_restored_step_are_not_there_twice(tmp_path):
    """Also where no record is before it: neither of training nor of evaluation."""
    with pytest.raises(RuntimeError, match="killed"):
        tiny_run.train(tmp_path, num_steps=48, data=_ends_at(40), log_every=4, keep=99)
    for step in steps_in(tmp_path / "checkpoints"):
        if step > 2:
            shutil.rmtree(tmp_path / "checkpoints" / str(step))
    assert tiny_run.outcome(tmp_path, num_steps=8, log_every=4) == (0, "")
    for split in files.SPLITS:
        assert [step for step, _ in events(tmp_path / "tensorboard" / split)] == [4, 8]


def test_events_of_a_run_whose_records_were_moved_away_stay(run, ended):
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).rename(run.parent / name)
    (run / "checkpoints").rename(run.parent / "elsewhere")
    before = {p: x for p, x in tree(run / "tensorboard").items() if isinstance(x, bytes)}
    continues(run, ended)
    assert before and before.items() <= tree(run / "tensorboard").items()


@pytest.mark.slow
def test_tensorboard_reads_what_is_written(run):
    from tensorboard.backend.event_processing import event_accumulator

    found = event_accumulator.EventAccumulator(str(run / "tensorboard" / "train"))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == [2, 4, 6]


# ---- Links, and files of the wrong kind ----


def test_no_link_is_followed(run, ended, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    for name in ("config.tmp", "metrics.tmp", ".config.gin.tmp", "summary.tmp"):
        (run / name).symlink_to(outside)
    continues(run, ended)
    assert outside.read_text() == "precious" and (run / "config.tmp").is_symlink()
    (run / files.TRACKERS).write_text("{}")
    for name in (*files._FILES, "flight/process_0.txt"):
        path = run / name
        content = path.read_bytes()
        path.unlink()
        path.symlink_to(outside)
        status, message = tiny_run.outcome(run)
        assert status == 2 and f"{path} is a link to {outside}" in message
        path.unlink()
        path.write_bytes(content)
    assert outside.read_text() == "precious"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_the_mark_of_a_run_without_checkpoints_is_a_file(tmp_path, make):
    mark = tmp_path / "checkpoints" / files.NOTHING_SAVED
    mark.parent.mkdir()
    make(mark)
    status, message = tiny_run.outcome(tmp_path)
    assert status == 2 and f"{mark} is a " in message and "Move it away" in message
    assert os.listdir(mark.parent) == [mark.name]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_folders_will_do(tmp_path, monkeypatch, number):
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or refuses_files:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    refuses_files = False
    with (
        contextlib.nullcontext()
        if number != errno.EIO
        else pytest.raises(OSError, match="Input/output")
    ):
        files.replace(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    refuses_files = True
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        files.fsync(tmp_path / "file")


def test_a_file_is_created_only_where_nothing_is(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    for name in ("link", "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(FileExistsError):
            files.create(tmp_path / name)
    (tmp_path / "to").write_text("precious")
    (tmp_path / "linked").symlink_to("to")
    with pytest.raises(OSError, match="Too many levels"):
        files.append(tmp_path / "linked")
    files.replace(tmp_path / "linked", "new")
    assert (tmp_path / "to").read_text() == "precious"
    assert (tmp_path / "linked").read_text() == "new" and not (tmp_path / "linked").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "linked", "to"]
    os.umask(before := os.umask(0))
    assert (tmp_path / "linked").stat().st_mode & 0o777 == 0o666 & ~before


def test_what_a_killed_process_left_of_a_replacement_is_removed(run):
    left = [run / ".summary.json.0123456789abcdef.tmp", run / f".run.{'0123456789abcdef' * 2}"]
    left.append(run / "checkpoints" / f".{files.NOTHING_SAVED}.0123456789abcdef.tmp")
    for path in (*left, run / ".mine.tmp", run / "0123456789abcdef.tmp"):
        path.write_text("")
    assert tiny_run.outcome(run, num_steps=6) == (0, "")
    assert not [path for path in left if path.exists()]
    assert (run / ".mine.tmp").exists() and (run / "0123456789abcdef.tmp").exists()


def test_names_that_are_no_steps_are_passed_over(run, ended):
    for name in ("0099", "²", "٣", "1٣", "99x", "-1", " 99"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "77").write_text("a file")
    continues(run, ended, keep=9)
    assert steps_in(run / "checkpoints") == [2, 4, 6, 8]
    assert (run / "checkpoints" / "77.damaged").read_text() == "a file"
    assert (run / "checkpoints" / "٣").is_dir()


@pytest.mark.parametrize("text", ["[]", "3", "\ud800", "{", '{"step": "6"}'])
def test_a_summary_that_is_none_is_written_anew(run, text):
    (run / "summary.json").write_bytes(text.encode(errors="surrogatepass"))
    assert tiny_run.outcome(run, num_steps=6) == (0, "")
    assert summary(run)["step"] == 6


def test_notes_that_are_damaged_are_passed_over(tmp_path):
    flight = tmp_path / "flight"
    flight.mkdir()
    (flight / "process_0.txt").write_text(
        "process 0 7 host\n1 5 save 1000.5\nx 5 save 1\n2 6 save 1e300\n3 7 nothing 1\n"
    )
    (flight / "process_1.txt").write_bytes(b"\xff")
    (flight / "process_2.txt").write_text("process 1\n")
    os.mkfifo(flight / "process_3.txt")
    (note,) = last_notes(tmp_path)
    assert (note.step, note.phase) == (5, "save") and str(note)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parents[2])])
def test_a_save_follows_no_link_and_waits_for_no_fifo(run, ended, make):
    make(run / "checkpoints" / "8.orbax-checkpoint-tmp")
    (run.parent / "precious").write_text("precious")
    continues(run, ended)
    assert (run.parent / "precious").read_text() == "precious"


def test_a_checkpoint_with_a_fifo_in_it_is_damaged(run, ended):
    os.mkfifo(run / "checkpoints" / "6" / "state" / "d" / "waits")
    with pytest.raises(Damaged, match="6/state/d/waits is a FIFO"):
        checkpoint_files.read_manifest(run / "checkpoints" / "6")
    continues(run, ended)
    assert (run / "checkpoints" / "6.damaged").is_dir()


# ---- Old checkpoints ----


def test_a_checkpoint_that_is_a_link_is_not_removed(run, ended, capsys):
    shutil.move(run / "checkpoints" / "2", run.parent / "kept")
    (run / "checkpoints" / "2").symlink_to(run.parent / "kept")
    before = tree(run.parent / "kept")
    continues(run, ended, keep=1)
    assert steps_in(run / "checkpoints") == [2, 8]
    assert tree(run.parent / "kept") == before
    assert "cannot be removed" not in capsys.readouterr().out


def test_an_old_checkpoint_that_cannot_be_removed_is_reported_and_the_run_goes_on(
    run, ended, monkeypatch, capsys
):
    def busy(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", busy)
    continues(run, ended)
    expected = f"The checkpoint {run}/checkpoints/2 cannot be removed: Device or resource busy"
    assert expected in capsys.readouterr().out
    assert steps_in(run / "checkpoints") == [2, 4, 6, 8]


# ---- Disks ----


@pytest.mark.parametrize("inodes", [114, 116, 118, 120])  # the folder, or one of its files
def test_a_disk_without_inodes_ends_the_run_and_says_what_is_saved(disk, inodes):
    disk.mount(f"size=20m,nr_inodes={inodes}")
    start = time.monotonic()
    code = (
        "from tests.support import tiny_run; print(*tiny_run.outcome({!r}, num_steps=100, keep=9))"
    )
    done = disk.run(sys.executable, "-c", code.format(str(disk.folder)))
    status, _, message = done.stdout.strip().splitlines()[-1].partition(" ")
    assert status == "1" and "No space left on device" in message, done.stdout + done.stderr
    saved = steps_in(disk.seen / "checkpoints")
    assert saved and f"Step {saved[-1]} is saved" in message
    assert time.monotonic() - start < 60, "Python waited for threads"


# ---- Memory ----


def test_records_need_no_more_memory_as_they_become_many(tmp_path):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    written = metric_log(print)
    written.open(tmp_path, 0, evaluates_again=False)
    for number in range(30_000):
        sums = throughput.accumulate({}, [{"loss": np.array((float(number), 4.0))}])
        written.write("train", number, throughput.means(sums))
        written.tell(saved=False)
        if number == 3_000:
            early = resident()
    assert resident() - early < 10e6
    assert written.sync() == 30_000
    written.close()


def acting(action, step=4):
    """Data whose code does something as it makes the batch of a step."""

    def train(order):
        for number, batch in enumerate(tiny_run.DATA.train(order), order.first_step):
            if number == step:
                action()
            time.sleep(0.02)  # longer than a burst of reading ahead
            yield batch

    return dataclasses.replace(tiny_run.DATA, train=train)


def test_own_code_may_change_the_current_folder(ended, tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    moves = acting(lambda: os.chdir("elsewhere"))
    assert tiny_run.outcome("run", num_steps=8, data=moves) == (0, "")
    assert summary(tmp_path / "run")["params_fingerprint"] == ended[1]
    assert not list((tmp_path / "elsewhere").iterdir())
    assert f"in {tmp_path / 'run' / 'summary.json'}" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert tiny_run.outcome("run", num_steps=8) == (0, "")
    assert ": run/summary.json\n" in capsys.readouterr().out, "as the user names it"


@pytest.mark.parametrize("moved", [True, False])
def test_a_folder_that_is_moved_meanwhile_is_told_and_continues_once_it_is_back(
    ended, tmp_path, moved
):
    run, other = tmp_path / "run", tmp_path / "other"

    def move():  # batches are read ahead: the first save may still be under way
        deadline = time.monotonic() + 60
        while 2 not in steps_in(run / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.01)
        run.rename(other)

    status, said = tiny_run.outcome(run, num_steps=8, data=acting(move, 6))
    assert status == 1 and "was moved or removed" in said and "the same command continues" in said
    # A save that was under way may end in the old place.
    assert set(steps_in(run / "checkpoints")) <= {4}, "nothing is begun anew"
    if moved:
        shutil.rmtree(run, ignore_errors=True)  # nothing of the run writes any more
        other.rename(run)
        assert 2 in steps_in(run / "checkpoints")
    assert tiny_run.outcome(run, num_steps=8) == (0, "")
    assert summary(run)["params_fingerprint"] == ended[1]


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_records_outlive_the_removal_or_replacement_of_their_file(tmp_path, how, capsys):
    whole, run = tmp_path / "whole", tmp_path / "run"
    path = run / "metrics.jsonl"

    def act():
        path.unlink() if how == "removed" else files.replace(path, path.read_text())

    assert tiny_run.outcome(whole, num_steps=8) == (0, "")
    assert tiny_run.outcome(run, num_steps=8, data=acting(act)) == (0, "")
    assert records(run) == records(whole)
    assert "was removed or replaced while the run wrote to it" in capsys.readouterr().out
    assert path.with_name("metrics.jsonl.damaged").exists() == (how == "replaced")


def test_a_clock_that_jumps_ends_no_save(tmp_path, monkeypatch):
    """As that of a machine that was suspended for hours."""
    from orbax.checkpoint._src.futures import future

    jumps = itertools.count(time.time(), 6 * 3600)
    monkeypatch.setattr(future, "time", types.SimpleNamespace(time=lambda: next(jumps)))
    assert tiny_run.outcome(tmp_path, num_steps=2) == (0, "")
    assert steps_in(tmp_path / "checkpoints") == [2]


def test_an_empty_name_is_no_folder(tmp_path, monkeypatch):
    """As of a variable of the shell that is not set."""
    monkeypatch.chdir(tmp_path)
    status, said = tiny_run.outcome("", num_steps=2)
    assert status == 2 and "needs a workdir" in said and not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="needs a workdir"):
        research_dp.run("runs/digits.gin", workdir="")
