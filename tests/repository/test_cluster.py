"""The examples for clusters, as far as they can be tried without one."""

import os
import re
import subprocess

import pytest
import yaml

from research_dp.commands import cli
from research_dp.runs.flight_recorder import Recorder
from tests.support.processes import RUN
from tests.support.repository import ROOT
from tests.support.runs import summary

CLUSTER = ROOT / "experiments" / "cluster"


def test_the_flags_in_the_examples_are_flags_of_the_command():
    pod = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]
    job = pod["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "research_dp.train"]
    args = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    given = cli.parse("train", args)
    assert (given["num_processes"], given["process_id"]) == (job["completions"], 1)
    assert job["parallelism"] == job["completions"]
    assert given["coordinator"] == "research-dp-workers-0-0.research-dp:8476"

    script = (CLUSTER / "train.sbatch").read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    flags = [word for word in re.findall(r"--[\w.]+=\S+", script) if "output" not in word]
    own = [f for f in flags if f.startswith(("--coord", "--heart", "--gin", "--workdir"))]
    assert cli.parse("train", [*own, "--gin_file=f"])["coordinator"] == "auto"
    assert len(own) == 6


@pytest.mark.slow
def test_a_run_is_looked_back_on(command, tmp_path):
    for process, place in enumerate([("step", 9), ("data", 8), ("step", 9)]):
        Recorder(tmp_path, process, 3).note(*place)
    done = command(f"--post_mortem={tmp_path}", module="research_dp.launch")
    assert done.returncode == 0
    assert done.stdout.startswith("process 1 is behind: step 8, phase data\n")
    assert len(done.stdout.splitlines()) == 4
    assert command(f"--post_mortem={tmp_path / 'no'}", module="research_dp.launch").returncode == 2


@pytest.mark.slow
def test_processes_find_each_other_by_slurms_variables(command, tmp_path):
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
    }
    flags = [*RUN, "--coordinator=auto", "--gin.train.num_steps=2", f"--workdir={tmp_path}"]
    both = [
        command(*flags, start_only=True, **job, SLURM_PROCID=str(i), SLURM_LOCALID=str(i))
        for i in range(2)
    ]
    for process in both:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    assert summary(tmp_path)["processes"] == 2
