"""The same state on disk whatever the strategy; what is damaged is not taken for it."""

import contextlib
import errno
import functools
import os
import resource
import shutil
import time

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils

from research_dp.config import load
from research_dp.distributed.placement import fingerprint
from research_dp.errors import RunFailure, UsageError
from research_dp.models import mlp
from research_dp.runs import checkpoint_files
from research_dp.runs import manifest as manifest_module
from research_dp.runs.checkpoint import Checkpoints, read_saved
from research_dp.runs.checkpoint_files import MANIFEST, overview, read_manifest, steps_in, verify
from research_dp.runs.checksum import tree_checksums
from research_dp.runs.manifest import Damaged, Manifest, Progress, origin
from research_dp.training.initial import InitialParams
from tests.support.certified import batches, small_model
from tests.support.repository import stems
from tests.support.run_folders import rewrite
from tests.support.strategies import build, one_matrix, run_steps

PROGRESS = Progress(batch_size=32, seed=3, order="by index", window={"loss": (0.1, 3.0)})
PAIRS = [("fsdp", "ddp"), ("ddp", "hsdp"), ("zero1", "spmd_fsdp"), ("hsdp_zero1", "fsdp_keep")]


def save(folder, state, *steps, **options):
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(state, step, PROGRESS, origin())
    checkpoints.close()


def restore(folder, strategy, **more):
    checkpoints = Checkpoints(folder, **more)
    restored = checkpoints.restore(strategy)
    checkpoints.close()
    return restored


def assert_same_bits(restored, saved, strategy):
    """The saved state, on the strategy's own shardings."""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), saved)
    lies = jax.tree.map(
        lambda x, wanted: x.sharding.is_equivalent_to(wanted.sharding, x.ndim),
        restored,
        strategy.abstract_state,
    )
    assert all(jax.tree.leaves(lies))
    assert fingerprint(restored.params) == fingerprint(saved.params)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_state_is_the_same_bits_under_another_strategy(first, second, tmp_path):
    state = run_steps(build(first, small_model("linen")), 2)
    saved = jax.device_get(state)
    save(tmp_path, state, 2)
    load.reset()
    other = build(second, small_model("nnx"))
    restored, manifest = restore(tmp_path, other)
    assert manifest.progress == PROGRESS
    assert_same_bits(restored, saved, other)


@pytest.mark.parametrize("stems", [("zero1", "fsdp"), ("fsdp", "zero1")])
def test_parameters_with_and_without_master_weights_continue_as_the_other(stems, tmp_path):
    """zero1 keeps wide parameters in its slices where they are gathered in bfloat16."""
    bound = {"zero1": ["fsdp_apply_gradients.gather_dtype = 'bfloat16'"], "fsdp": []}
    model = small_model("linen")
    first = build(stems[0], model, bindings=bound[stems[0]])
    state = run_steps(first, 2)
    save(tmp_path, state, 2)
    load.reset()
    second = build(stems[1], model, bindings=bound[stems[1]])
    restored, _ = restore(tmp_path, second)
    like = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), second.abstract_state)
    assert like == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), restored)
    by_stem = dict(zip(stems, (state, restored), strict=True))
    wide = by_stem["zero1"].opt_state.master, by_stem["fsdp"].params
    jax.tree.map(np.testing.assert_array_equal, *wide)
    run = second.train_step(restored, second.place_batch(batches()[2]))
    assert np.isfinite(jax.device_get(run[1]["loss"])).all()


def test_nothing_to_restore(tmp_path):
    strategy = build("single", one_matrix())
    assert Checkpoints(tmp_path / "none").restore(strategy) is None


# ---- One small checkpoint, and what can happen to it ----


@pytest.fixture(scope="module")
def trained():
    """A strategy, and its state after a step."""
    load.reset()
    strategy = build("fsdp", mlp(widths=(256, 64), num_classes=10))
    return strategy, run_steps(strategy, 1)


@pytest.fixture
def folder(trained, tmp_path, pristine):
    shutil.copytree(pristine, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@pytest.fixture(scope="module")
def pristine(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "checkpoints"
    save(path, trained[1], 1, 2, 3)
    return path


def test_manifest_says_where_the_run_stood_and_what_the_arrays_are(trained, folder):
    found = Manifest.read(folder / "2" / MANIFEST)
    assert (found.step, found.examples_seen, found.progress) == (2, 64, PROGRESS)
    shapes = {path: leaf.shape for path, leaf in found.leaves.items()}
    assert shapes["params/hidden_0/kernel"] == (16, 256)
    assert shapes["opt_state/0/mu/hidden_0/kernel"] == (16, 256)
    assert shapes["opt_state/0/count"] == ()
    assert found.origin["versions"]["jax"] == jax.__version__
    assert not found.mismatch(tree_checksums(trained[1]))


def test_verifying_reads_every_array(trained, folder):
    assert verify(folder / "1").step == 1
    assert len(list(overview(folder, verified=True))) == 3
    flip_array(folder / "2", trained[1])
    with pytest.raises(Damaged, match="params/hidden_0/kernel does not match"):
        verify(folder / "2")
    (folder / "3" / "state" / "_METADATA").unlink()
    (folder / "4.orbax-checkpoint-tmp").mkdir()
    (folder / "1.damaged").mkdir()
    rows = {(row.step, row.status.split(":")[0]): row for row in overview(folder, verified=True)}
    assert list(rows) == [
        (1, "intact"),
        (1, "damaged, was moved aside"),
        (2, "damaged"),
        (3, "damaged"),
        (4, "not complete"),
    ]
    assert [row.damaged for row in rows.values()] == [False, False, True, True, False]
    assert rows[1, "intact"].manifest.examples_seen == 32
    unread = [row.status for row in overview(folder, verified=False)]
    assert unread.count("not verified") == 3


def test_older_ones_are_removed_once_the_new_one_is_on_the_disk(trained, tmp_path, monkeypatch):
    done = []
    for name in ("fsync_checkpoint", "prune"):

        def noted(*args, name=name, real=getattr(checkpoint_files, name)):
            done.append(name)
            return real(*args)

        monkeypatch.setattr(checkpoint_files, name, noted)
    save(tmp_path, trained[1], 1)
    assert done == ["fsync_checkpoint", "prune"]


def test_keeps_the_newest_and_those_of_a_period(trained, tmp_path):
    save(tmp_path, trained[1], *range(1, 8), keep=2, keep_period=3)
    assert steps_in(tmp_path) == [3, 6, 7]


def largest(folder):
    return max((p for p in folder.rglob("d/*")), key=lambda p: p.stat().st_size)


def flip_array(step, state):
    """Flips a bit of a weight, wherever its file lies."""
    weights = np.asarray(state.params["hidden_0"]["kernel"].addressable_shards[0].data).tobytes()
    file = next(p for p in (step / "state").rglob("*") if p.is_file() and weights in p.read_bytes())
    flip(file, file.read_bytes().index(weights))


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "a bit of a weight is flipped": None,
    "an array's file is cut": lambda step: largest(step / "state").write_bytes(b"half"),
    "an array's file is empty": lambda step: largest(step / "state").write_bytes(b""),
    "an array's file is missing": lambda step: largest(step / "state").unlink(),
    "Orbax's index is missing": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
    "Orbax's metadata are cut": lambda step: (step / "state" / "_METADATA").write_text("{"),
    "all arrays are missing": lambda step: shutil.rmtree(step / "state"),
    "the manifest is missing": lambda step: (step / MANIFEST).unlink(),
    "the manifest is cut": lambda step: (step / MANIFEST).write_text('{"content": {"st'),
    "the manifest's byte is flipped": lambda step: flip(step / MANIFEST, 200),
    "the manifest is of another step": lambda step: shutil.copy(
        step.with_name("2") / MANIFEST, step / MANIFEST
    ),
    "the folder is empty": lambda step: (shutil.rmtree(step), step.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_good_checkpoint_is_used_and_nothing_is_deleted(damage, folder, trained):
    strategy, state = trained
    do = DAMAGE[damage] or functools.partial(flip_array, state=state)
    do(folder / "3")
    left = sorted(p.name for p in (folder / "3").rglob("*"))
    said = []
    restored, _ = restore(folder, strategy, say=said.append)
    assert_same_bits(restored, jax.device_get(state), strategy)
    assert steps_in(folder) == [1, 2]
    assert sorted(p.name for p in (folder / "3.damaged").rglob("*")) == left
    assert said[0].startswith("The checkpoint of step 3 is damaged: ") and len(said) == 2
    assert str(folder / "3.damaged") in said[1]
    # The step can be saved again, and damaged again.
    save(folder, state, 3)
    assert steps_in(folder) == [1, 2, 3]
    do(folder / "3")
    assert restore(folder, strategy) is not None
    assert {"3.damaged", "3.damaged2"} <= {p.name for p in folder.iterdir()}


def test_a_value_that_files_do_not_protect_is_found_by_its_checksum(folder, trained):
    """As a bit that was flipped in memory before it was written."""

    def change(content):
        shape, dtype, _ = content["leaves"]["params/head/bias"]
        wrong = {"params/head/bias": [shape, dtype, "0" * 16]}
        return {**content, "leaves": {**content["leaves"], **wrong}}

    rewrite(folder / "3" / MANIFEST, change)
    said = []
    assert restore(folder, trained[0], say=said.append) is not None
    assert "params/head/bias does not match its checksum" in said[0]


def test_older_damage_does_no_harm(folder, trained):
    for file in (folder / "1").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xff")
    assert restore(folder, trained[0]) is not None
    save(folder, trained[1], 4, keep=4)
    assert steps_in(folder) == [1, 2, 3, 4]


def test_if_none_is_good_the_run_is_refused_and_nothing_is_moved(folder, trained):
    for step in (1, 2, 3):
        DAMAGE["an array's file is missing"](folder / str(step))
    with pytest.raises(UsageError, match=r"no checkpoint .* step 3 is damaged .* 2 older ones"):
        restore(folder, trained[0])
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2", "3"]


def test_a_half_written_checkpoint_is_passed_over(folder, trained):
    half = folder / "4.orbax-checkpoint-tmp"
    shutil.copytree(folder / "3" / "state", half / "state.orbax-checkpoint-tmp")
    said = []
    assert restore(folder, trained[0], say=said.append) is not None
    assert said == ["Step 4 was being saved when the run ended, and is not complete"]
    assert half.exists()
    save(folder, trained[1], 4, keep=4)
    assert steps_in(folder) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (optax.sgd(0.1), r"opt_state/0/count, int32\[\], is only in it"),
        (optax.adam(1e-2, mu_dtype="bfloat16"), r"mu/head/bias is bfloat16\[10\] here and float32"),
    ],
)
def test_another_optimizer_is_refused_by_name(optimizer, told, folder):
    other = build("ddp", mlp(widths=(256, 64), num_classes=10), optimizer=optimizer)
    with pytest.raises(UsageError, match=told):
        restore(folder, other)
    assert steps_in(folder) == [1, 2, 3]


@contextlib.contextmanager
def no_room():
    """Files of this process can have few bytes, as on a disk that is nearly full.

    Not beyond a test's end: pytest itself may be writing to a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failure_in_the_background_is_raised_at_the_next_look(trained, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(trained[1], 1, PROGRESS, origin())
    checkpoints.wait()
    told = r"saving step 2 .* failed: File too large. Step 1 is saved"
    with no_room(), pytest.raises(RunFailure, match=told):
        checkpoints.save(trained[1], 2, PROGRESS, origin())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            checkpoints.check()
            time.sleep(0.01)
    checkpoints.close()
    assert steps_in(tmp_path) == [1]


# ---- Any to any ----


@functools.cache
def built(stem, api):
    load.reset()
    return build(stem, small_model(api))


# Files know layouts, and no strategies: zero2 lays out as zero1, fsdp_keep as fsdp, spmd as ddp.
SAVED = sorted({*stems()} - {"zero2", "fsdp_keep", "spmd"})


@pytest.mark.slow
@pytest.mark.parametrize("first", SAVED)
def test_every_strategy_restores_what_every_other_layout_saved(first, tmp_path):
    state = run_steps(built(first, "linen"), 2)
    saved = jax.device_get(state)
    save(tmp_path, state, 2)
    for i, second in enumerate(stems()):
        other = built(second, ("linen", "nnx")[i % 2])
        assert_same_bits(restore(tmp_path, other)[0], saved, other)


def test_what_cannot_be_read_here_and_now_is_not_taken_for_damage(tmp_path, monkeypatch):
    strategy = build("ddp", one_matrix())
    save(tmp_path, strategy.init(jax.random.key(0)), 1)

    def too_many(file):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Manifest, "read", too_many)
    with pytest.raises(RunFailure, match="Too many open files"):
        restore(tmp_path, strategy)
    assert steps_in(tmp_path) == [1]


def test_a_lack_of_memory_is_not_taken_for_damage(folder, trained, monkeypatch):
    def no_memory(*args, **options):
        raise MemoryError("cannot allocate 8 GiB")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", no_memory)
    with pytest.raises(RunFailure, match="cannot be read: cannot allocate 8 GiB"):
        restore(folder, trained[0])
    assert steps_in(folder) == [1, 2, 3]


def test_a_checkpoint_of_a_newer_version_is_left_alone(tmp_path, monkeypatch):
    strategy = build("ddp", one_matrix())
    monkeypatch.setattr(manifest_module, "FORMAT", 2)
    save(tmp_path, strategy.init(jax.random.key(0)), 1)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="of format 2, and this version"):
        restore(tmp_path, strategy)
    assert steps_in(tmp_path) == [1]


def test_a_checkpoint_under_the_name_of_another_step_is_damaged_wherever_it_is_read(folder):
    (folder / "3").rename(folder / "7")
    with pytest.raises(UsageError, match=r"step 7 in .* is damaged: its manifest is of step 3"):
        read_saved(folder.parent)
    initial = InitialParams(str(folder / "7"))
    with pytest.raises(UsageError, match="cannot be read: its manifest is of step 3"):
        initial.arrays(build("ddp", one_matrix()), print)
    rows = {row.step: row.status for row in overview(folder, verified=False)}
    assert rows[7] == "damaged: its manifest is of step 3"
    (folder / "7").rename(folder.parent / "kept")  # no name of a step
    assert read_manifest(folder.parent / "kept").step == 3


OTHER_CONTENTS = {
    "nothing": lambda content: {},
    "a list": lambda content: [content],
    "no progress": lambda content: {k: x for k, x in content.items() if k != "progress"},
    "other progress": lambda content: {**content, "progress": {"a": 1}},
    "a text for a number": lambda content: {**content, "step": "2"},
    "a text for a count": lambda content: {
        **content,
        "progress": {**content["progress"], "batch_size": "32"},
    },
    "a window of three": lambda content: {
        **content,
        "progress": {**content["progress"], "window": {"loss": [1, 2, 3]}},
    },
    "a negative step": lambda content: {**content, "step": -5},
    "other leaves": lambda content: {**content, "leaves": [1]},
    "leaves of nothing": lambda content: {**content, "leaves": {"params": []}},
    "no leaves": lambda content: {**content, "leaves": {}},
    "other data": lambda content: {**content, "data": {"splits": [1]}},
    "another origin": lambda content: {**content, "origin": [1]},
}


@pytest.mark.parametrize("case", [*OTHER_CONTENTS, "deep", "deep and no JSON"])
def test_a_manifest_of_another_content_is_damaged_though_its_checksum_is_right(
    case, folder, trained
):
    file = folder / "2" / MANIFEST
    if case in OTHER_CONTENTS:
        rewrite(file, OTHER_CONTENTS[case])
    else:
        end = "]" * 100_000 if case == "deep" else ""
        file.write_text('{"content": ' + "[" * 100_000 + end + ', "sha256": ""}')
    shutil.rmtree(folder / "3")
    with pytest.raises(Damaged):
        verify(folder / "2")
    with pytest.raises(UsageError, match=r"step 2 in .* is damaged: "):
        read_saved(folder.parent)
    for verified in (False, True):
        list(row.cells() for row in overview(folder, verified=verified))
    if case == "no leaves":
        with pytest.raises(UsageError, match=r"of another model.*: params/head/bias, .* is not in"):
            restore(folder, trained[0])
    else:
        assert restore(folder, trained[0])[1].step == 1


def test_arrays_that_a_manifest_has_not_are_not_taken_unverified(folder, trained):
    rewrite(folder / "2" / MANIFEST, OTHER_CONTENTS["no leaves"])
    with pytest.raises(UsageError, match="params/head/bias and 5 more does not match its"):
        InitialParams(str(folder / "2")).arrays(trained[0], print)


def test_what_a_manifest_says_is_shown_without_what_a_terminal_acts_on(folder, trained):
    def change(content):
        content["origin"] |= {"strategy": "a\x1b[31m", "time": "b\n" + "x" * 1000}
        bias = content["leaves"].pop("params/hidden_0/bias")
        content["leaves"]["params/\x1b]0;hidden_0\n"] = bias
        return content

    rewrite(folder / "3" / MANIFEST, change)
    *_, row = overview(folder, verified=False)
    assert all(cell.isprintable() and len(cell) < 300 for cell in row.cells())
    with pytest.raises(Damaged, match=r"params/\\x1b\]0;hidden_0\\n is not both") as damaged:
        verify(folder / "3")
    assert str(damaged.value).isprintable()
    with pytest.raises(UsageError) as refused:
        restore(folder, trained[0])
    assert "\x1b" not in str(refused.value)


def test_a_save_that_fails_here_is_told_though_others_wait_for_this_process(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_files, "fsync_checkpoint", full)
    state = build("ddp", one_matrix()).init(jax.random.key(0))
    checkpoints.save(state, 1, PROGRESS, origin())
    deadline = time.monotonic() + 60
    with pytest.raises(RunFailure, match=r"saving step 1 .* No space left"):
        while time.monotonic() < deadline:
            checkpoints.check()
            time.sleep(0.01)
    checkpoints.close()


def test_saving_does_not_ask_when_to_stop(tmp_path, monkeypatch):
    # Processes agree by the steps that they ask about, which must not go back.
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    save(tmp_path, build("ddp", one_matrix()).init(jax.random.key(0)), 1, 2)
    assert not asked
