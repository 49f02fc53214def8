"""The same fingerprint from commands: in several processes, and killed and continued elsewhere."""

import pytest

from tests.support.processes import RUN, start
from tests.support.runs import killed_once_saved, summary

EXACT = [
    "--gin_file=gin/options/deterministic.gin",
    "--gin.train.max_grad_norm=0.5",
    "--gin.mlp.dropout_rate=0.2",
]


def one(command, folder, *flags):
    done = command(*RUN, *EXACT, *flags, f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    return summary(folder)


@pytest.mark.exhaustive
def test_the_same_fingerprint_from_one_process_and_from_several(command, tmp_path):
    flags = ["--gin.train.num_steps=30"]
    single = ["--gin_file=gin/strategies/single.gin", "--cpu_devices=1"]
    expected = one(command, tmp_path / "single", *flags, *single)
    ddp = ["--gin_file=gin/strategies/ddp.gin", "--gin.train.accumulation_steps=2"]
    found = [one(command, tmp_path / "ddp", *flags, *ddp, "--cpu_devices=4")]
    for count, stem in ((2, "fsdp"), (4, "hsdp")):
        folder = tmp_path / stem
        more = [f"--gin_file=gin/strategies/{stem}.gin", f"--cpu_devices={8 // count}"]
        several = start(command, count, *EXACT, *flags, *more, f"--workdir={folder}")
        outputs = [process.communicate(timeout=200)[0] for process in several]
        assert [process.returncode for process in several] == [0] * count, outputs
        found.append(summary(folder))
    assert [one["processes"] for one in found] == [1, 2, 4]
    for other in found:
        assert other["params_fingerprint"] == expected["params_fingerprint"]
        assert other["train"] == expected["train"]
        assert other["eval"]["loss"] == expected["eval"]["loss"]


@pytest.mark.slow
def test_killed_and_continued_on_other_devices_leaves_the_same_bits(command, tmp_path):
    flags = ["--gin.train.num_steps=600", "--gin.train.checkpoint_every=50"]
    expected = one(command, tmp_path / "whole", *flags, "--cpu_devices=4")
    broken = tmp_path / "broken"
    for stem, devices in (("fsdp", 8), ("ddp", 4), ("zero1", 2)):
        more = [f"--gin_file=gin/strategies/{stem}.gin", f"--cpu_devices={devices}"]
        killed_once_saved(command, broken, *RUN, *EXACT, *flags, *more)
    found = one(command, broken, *flags, "--cpu_devices=8")
    assert found["params_fingerprint"] == expected["params_fingerprint"]
    assert (found["train"], found["eval"]) == (expected["train"], expected["eval"])
