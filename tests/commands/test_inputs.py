"""Data and folders as commands meet them: another data set, another folder, another setting."""

import pytest

from research_dp.data import builders
from research_dp.runs.checkpoint_files import MANIFEST
from tests.support import data
from tests.support.disks import train as train
from tests.support.processes import RUN
from tests.support.programs import free_port
from tests.support.run_folders import rewrite
from tests.support.runs import summary

SHORT = ["--gin.train.num_steps=2", "--gin.mlp.widths=(8,)", "--gin.train.checkpoint_every=None"]
LONGER = [*SHORT, "--gin.train.num_steps=4"]


@pytest.fixture
def few_digits(tmp_path):
    """A folder with a data set of the same name and version, and fewer examples."""
    folder = tmp_path / "few"
    with data.few_digits(200):  # the test may be the first that prepares the whole one
        builders.download_and_prepare(builders.find_builder("digits", str(folder)))
    return folder


def forget_the_data(manifest):
    """Makes a manifest what an earlier version wrote."""
    rewrite(manifest, lambda content: {k: x for k, x in content.items() if k != "data"})


def test_what_changed_before_a_continuation_is_told_and_other_data_is_refused(
    train, tmp_path, few_digits
):
    run = tmp_path / "run"
    status, out, _ = train(run, *SHORT)
    assert status == 0 and "Changed" not in out
    told = "Data: digits 1.0.0: train 1,437 examples (digest "
    assert told in out
    splits = summary(run)["data"]["splits"]
    assert splits["train"]["examples"] == 1437 and splits["train"]["digest"] in out
    # Another data set behind the same name.
    before = sorted((run / "checkpoints").rglob("*"))
    status, out, err = train(run, *LONGER, f"--gin.tfds_data.data_dir={few_digits}")
    assert status == 2
    assert f"the run in {run} was trained on other data: the number of examples in train" in err
    assert "train was 1,437, and is 200 now.\n" in err and "use another --workdir" in err
    assert sorted((run / "checkpoints").rglob("*")) == before
    # An earlier version's checkpoint, and another way to normalise.
    forget_the_data(run / "checkpoints" / "2" / MANIFEST)
    mean = "image_classification.mean"
    status, out, _ = train(run, *LONGER, f"--gin.{mean}=(0.3,)")
    assert status == 0
    assert f"Changed since step 2: {mean}: (0.5,) -> (0.3,)  (--gin.{mean})" in out
    assert "Changed since step 2: train.num_steps: 2 -> 4" in out
    assert "The checkpoint does not record its data; this data is assumed" in out and told in out


def two_apart(command, workdirs, folders, *flags):
    """Two processes of one run, each with a folder of its own for results and for data."""
    port = free_port()
    processes = [
        command(
            *RUN,
            *flags,
            f"--coordinator=127.0.0.1:{port}",
            "--num_processes=2",
            f"--process_id={process}",
            f"--workdir={workdir}",
            start_only=True,
            **({"TFDS_DATA_DIR": str(folder)} if folder else {}),
        )
        for process, (workdir, folder) in enumerate(zip(workdirs, folders, strict=True))
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    return [process.returncode for process in processes], outputs


@pytest.mark.slow
def test_processes_that_do_not_share_the_work_folder_are_refused_at_the_start(command, tmp_path):
    workdirs = [tmp_path / "0", tmp_path / "1"]
    statuses, outputs = two_apart(command, workdirs, [None, None], "--gin.train.num_steps=5")
    assert statuses == [2, 2], outputs
    for output in outputs:
        assert f"process 1: --workdir={workdirs[1]} on " in output
        assert "is not the folder that process 0 has on" in output
        assert "Traceback" not in output
    assert not (workdirs[0] / "metrics.jsonl").exists() and not workdirs[1].exists()
    assert not list(workdirs[0].glob(".run.[0-9a-f]*"))


@pytest.mark.slow
def test_processes_with_different_data_are_refused_at_the_start(
    command, tmp_path, data_dir, few_digits
):
    run = tmp_path / "run"
    statuses, outputs = two_apart(
        command, [run, run], [data_dir, few_digits], "--gin.train.num_steps=5"
    )
    assert statuses == [2, 2], outputs
    told = "the number of examples in train is 1,437 in process 0 and 200 in process 1"
    for output in outputs:
        assert "processes read different data of digits" in output and told in output
        assert "Traceback" not in output
    assert not (run / "checkpoints").exists()
