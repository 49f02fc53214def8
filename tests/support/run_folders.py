"""Folders of runs as tests need them, written without training."""

import hashlib
import json
import os
import stat

import numpy as np

START = {
    "time": "2026-01-02 03:04:05 +0000",
    "step": 0,
    "command": "python -m research_dp.train --workdir=w",
    "commit": "0123abcd",
    "python": "3.11.7",
    "versions": {"jax": "0.1"},
    "platform": "cpu",
    "device_kind": "cpu",
    "devices": 8,
    "processes": 1,
    "host": "here",
}
BINDINGS = {
    "train.strategy": ("@data_parallel()", "strategies/ddp.gin:3", True),
    "train.seed": ("0", "runs/digits.gin:4", False),
    "train.num_steps": ("100", None, False),
}


def losses(steps=20, seed=0):
    """A falling loss with some noise."""
    noise = np.random.default_rng(seed).normal(size=steps) * 0.02
    return (np.exp(-np.arange(steps) / 8) + noise).tolist()


def write_run(
    folder, *, loss=None, bindings=(), start=(), fingerprint="aa", step=100, done=True, **facts
):
    """Writes the folder of a run with records at even distances; returns the folder."""
    folder.mkdir(parents=True)
    loss = losses() if loss is None else loss
    (folder / "config.gin").write_text("train.num_steps = 100\n")
    every = step // max(1, len(loss))
    records = [
        {"split": "train", "step": every * (i + 1), "loss": x, "grad_norm": 2 * x}
        | {"steps_per_second": 50.0, "data_wait_seconds": 0.01}
        for i, x in enumerate(loss)
    ]
    records.append({"split": "eval", "step": step, "loss": 0.5, "accuracy": 0.9})
    lines = (json.dumps({k: v if v == v else None for k, v in r.items()}) for r in records)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    bound = {**BINDINGS, **dict(bindings)}
    content = {
        "format": 1,
        "strategy": "ddp",
        "mesh": {"data": 8, "fsdp": 1},
        "algorithm": None,
        "bytes_per_device": {"params": 400_000, "gradients": 400_000, "opt_state": 800_000},
        "program": {"temp_bytes": 900_000, "peak_bytes": 10**6, "needed_bytes": 2 * 10**6},
        "bindings": {
            name: {"value": value, "place": place, "of_strategy": of_strategy}
            for name, (value, place, of_strategy) in bound.items()
        },
        "starts": [{**START, **dict(start)}],
        **facts,
    }
    (folder / "run.json").write_text(json.dumps(content))
    if done:
        summary = {"step": step, "params_fingerprint": fingerprint, "steps_per_second": 50.0}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def tree(folder):
    """Contents of all that is in a folder, by path; nothing is followed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[str(path.relative_to(folder))] = os.readlink(path)
        elif stat.S_ISREG(mode):
            found[str(path.relative_to(folder))] = path.read_bytes()
        else:
            found[str(path.relative_to(folder))] = stat.S_IFMT(mode)
    return found


def rewrite(manifest, change):
    """Changes the content of a manifest by a function; its checksum is right again."""
    content = change(json.loads(manifest.read_text())["content"])
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({"content": content, "sha256": digest}))
