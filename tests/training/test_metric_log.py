"""Which steps are recorded, evaluated and saved, and that a continued run records the same."""

import numpy as np
import optax
import pytest

from research_dp.runs.checkpoint_files import steps_in
from research_dp.runs.manifest import Progress
from research_dp.runs.records import truncate_records
from research_dp.training.metric_log import MetricLog, ProgressBar
from research_dp.training.preemption import StopSignal
from tests.support import tiny_run
from tests.support.programs import output
from tests.support.runs import records

STEPS = 60


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """60 steps: recorded each 10, and each step."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for every in (10, 1):
        options = {"num_steps": STEPS, "log_every": every, "checkpoint_every": None}
        assert tiny_run.outcome(folder / str(every), **options) == (0, "")
    return folder


@pytest.mark.parametrize("stops", [(45,), (40,), (3, 45, 46)])
def test_a_run_that_was_stopped_records_what_an_undisturbed_one_does(
    tmp_path, undisturbed, monkeypatch, stops
):
    options = {"num_steps": STEPS, "log_every": 10, "checkpoint_every": None}
    for stop in stops:
        monkeypatch.setattr(StopSignal, "requested", lambda self, step, stop=stop: step == stop)
        assert tiny_run.train(tmp_path, **options) == 143
        assert steps_in(tmp_path / "checkpoints")[-1] == stop
    monkeypatch.undo()
    assert tiny_run.train(tmp_path, **options) == 0
    assert records(tmp_path) == records(undisturbed / "10")


def test_a_record_is_the_mean_of_the_steps_since_the_one_before(undisturbed):
    each = [record["loss"] for record in records(undisturbed / "1", "train")]
    tens = records(undisturbed / "10", "train")
    assert len(each) == STEPS and [r["step"] for r in tens] == list(range(10, STEPS + 1, 10))
    means = np.reshape(each, (-1, 10)).mean(1)
    np.testing.assert_allclose([record["loss"] for record in tens], means, rtol=1e-6)
    assert np.ptp(means) > 1e-2, "all the same: no difference could be seen"


@pytest.mark.parametrize(
    ("every", "steps"), [(4, [4, 8]), (3, [3, 6, 8]), (1, [*range(1, 9)]), (None, [8])]
)
def test_evaluations_are_at_every_kth_step_and_the_last_each_once(tmp_path, every, steps):
    assert tiny_run.train(tmp_path, num_steps=8, eval_every=every, checkpoint_every=None) == 0
    assert [record["step"] for record in records(tmp_path, "eval")] == steps


@pytest.mark.parametrize(("again", "kept"), [(False, [0, 1, 2]), (True, [0, 1])])
def test_records_of_the_restored_step_are_kept(tmp_path, again, kept):
    lines = [
        '{"split": "train", "step": 9, "loss": 1.0}',
        '{"split": "train", "step": 10, "loss": 2.0}',
        '{"split": "eval", "step": 10, "loss": 3.0}',
        '{"split": "train", "step": 11, "loss": 4.0}',
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(lines) + "\n")
    assert len(truncate_records(file, 10, evaluates_again=again)) == len(kept)
    assert file.read_text().splitlines() == [lines[index] for index in kept]


@pytest.mark.parametrize("every", [1, None])
def test_what_an_optimizer_made_infinite_is_not_saved(tmp_path, monkeypatch, every):
    # Gradients are finite, and their update is not.
    twice = optax.chain(optax.scale(-1e30), optax.scale(1e30))
    monkeypatch.setattr(tiny_run, "OPTIMIZER", twice)
    monkeypatch.setattr(tiny_run, "_strategy", tiny_run._strategy.__wrapped__)
    status, message = tiny_run.outcome(tmp_path, num_steps=1, checkpoint_every=every)
    assert status == 1 and "step 1: " in message and "has become infinite or NaN" in message
    assert steps_in(tmp_path / "checkpoints") == []
    assert not (tmp_path / "summary.json").exists()


def test_to_import_checkpoints_loads_neither_orbax_nor_tensorflow():
    program = (
        "import sys\n"
        "import research_dp.runs.checkpoint, research_dp.training.trainer\n"
        "late = ('orbax', 'tensorstore', 'tensorflow', 'tensorboard', 'grain')\n"
        "print(*(name for name in late if name in sys.modules))"
    )
    assert output(program).split() == []


@pytest.mark.parametrize(("left", "words"), [(45, "45 s"), (125, "2 min 5 s"), (3660, "1 h 1 min")])
def test_the_time_left_is_in_words(capsys, left, words):
    rates = {"steps_per_second": 1.0, "examples_per_second": 8.0}
    ProgressBar(5000, 0).metrics("train", 5000 - left, rates)
    assert f"examples/s  {words} left" in capsys.readouterr().out


def test_updates_of_a_restored_window_are_counted_once():
    window = {"grad_norm": (4.5, 3.0)}
    saved = Progress(batch_size=8, seed=0, order="", window=window)
    log = MetricLog(saved, None, None)
    log.begin(10)
    assert log.updates == 7  # before the window, whose record adds its own
