"""What commands leave behind, compared with the record of it in tests/golden/results.json.

Files of a run, names of metrics, keys of JSON, and exit statuses: what scripts of users read.
"""

import json
import re

import pytest

from tests.support import golden
from tests.support.commands import command as run_here
from tests.support.runs import records

MLP = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin", "--gin.mlp.widths=(4,)"]
MLP += ["--gin.train.batch_size=32", "--cpu_devices=8"]
# A model with rates in tokens, all that can be recorded, and a profile.
LANGUAGE = [
    "--gin_file=models/lm_tiny.gin",
    "--gin_file=data/random_tokens.gin",
    "--gin_file=optim/adamw_cosine.gin",
    "--gin_file=strategies/fsdp.gin",
    "--gin.VOCAB_SIZE=64",
    "--gin.random_tokens.vocab_size=64",
    "--gin.random_tokens.length=16",
    "--gin.random_tokens.eval_examples=8",
    "--gin.transformer.depth=1",
    "--gin.transformer.width=16",
    "--gin.transformer.mlp_width=16",
    "--gin.train.batch_size=8",
    "--gin.train.num_steps=4",
    "--gin.train.log_every=2",
    "--gin.train.profile_at=1",
    "--gin.train.on_nonfinite=skip",
    "--gin.train.max_grad_norm=1.0",
    "--cpu_devices=8",
]


def keys(value, path=""):
    """Paths of all keys; those of a list's items once."""
    if isinstance(value, dict):
        return {line for key, inner in value.items() for line in keys(inner, f"{path}/{key}")}
    if isinstance(value, list) and value:
        return {line for inner in value for line in keys(inner, f"{path}[]")}
    return {path}


def files(folder):
    """Files of a run; those of libraries (TensorBoard, Orbax, the profiler) by their folder."""
    found = set()
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        name = re.sub(r"^((tensorboard|profile|checkpoints/\d+)/[^/]+)/.*", r"\1/...", name)
        if path.is_file():
            found.add(re.sub(r"\d{4,}.*|events\.out.*", "...", name))
    return sorted(found)


def read(path):
    return json.loads(path.read_text())


def metrics(folder):
    lines = records(folder, measured=True)
    return sorted({f"{line['split']}: {name}" for line in lines for name in line})


def run_results(folder):
    return {
        "files": files(folder),
        "metrics.jsonl": metrics(folder),
        "summary.json": sorted(keys(read(folder / "summary.json"))),
    }


def damage(folder):
    """Flips a byte of an array of the newest checkpoint."""
    newest = max((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    for path in (newest / "state").rglob("d/*"):
        text = bytearray(path.read_bytes())
        text[len(text) // 2] ^= 1
        path.write_bytes(text)


@pytest.mark.slow
def test_what_commands_leave_behind_is_as_recorded(command, data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    statuses = {}

    def status(name, *flags, module="train"):
        printed, statuses[f"{module}, {name}"] = run_here(module, *map(str, flags))
        assert "Traceback" not in printed, printed
        return printed

    results = {}
    short = ["--gin.train.num_steps=2", "--gin.train.checkpoint_every=1"]
    sweep = tmp_path / "sweep"
    vary = ["--vary_file=,strategies/ddp.gin", f"--workdir={sweep}"]
    status("all done", *MLP, *short, *vary, module="sweep")
    results["folders of a sweep"] = sorted(path.name for path in sweep.iterdir())
    run = sweep / "ddp"
    results["classification"] = run_results(run)
    status("whole checkpoints", run, "--verify", module="checkpoints")
    damage(run / "checkpoints")
    status("a damaged checkpoint", run, "--verify", module="checkpoints")

    # JAX's profiler crashes processes that have compiled for absent GPUs, as other tests do.
    done = command(*LANGUAGE, f"--workdir={tmp_path / 'lm'}")
    assert "Traceback" not in done.stderr, done.stderr
    statuses["train, done"] = done.returncode
    results["language"] = run_results(tmp_path / "lm")
    infinite = ["--gin.train.optimizer=@optax.sgd()", "--gin.optax.sgd.learning_rate=1e38"]
    many = ["--gin.train.num_steps=20", "--allow_unused", f"--workdir={tmp_path / 'inf'}"]
    status("a loss that is not finite", *MLP, *infinite, *many)
    listed = keys(json.loads(status("listed", "--list", "--json")))
    # Names of parameters are in tests/golden/interface.json.
    results["train --list --json"] = sorted(
        {re.sub("(/parameters)/[^/]*", r"\1/NAME", line) for line in listed}
    )

    plan = tmp_path / "plan.json"
    topology = ["--topology=cpu:8", "--strategies=fsdp", f"--json={plan}"]
    status("planned", *MLP[:-1], *topology, module="plan")
    results["plan --json"] = sorted(keys(read(plan)))
    status("over budget", *MLP[:-1], *topology, "--gin.plan.max_peak_bytes=9", module="plan")

    certificate = tmp_path / "certificate.json"
    status("certified", *MLP, "--steps=1", f"--json={certificate}", module="certify")
    results["certify --json"] = sorted(
        {re.sub(r"(/differences)/.*(/\w+)", r"\1/NAME\2", line) for line in keys(read(certificate))}
    )
    results["exit statuses"] = statuses

    differs = golden.changes(golden.recorded("results", results), results)
    assert not differs, "\n".join([*differs, f"If this is meant: {golden.command(__file__)}"])
