"""What a resumed run must share with the saved one, and what it may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gin
import jax

from research_dp.distributed.mesh import first_problem, of_the_first
from research_dp.errors import UsageError
from research_dp.runs import files
from research_dp.runs.facts import bindings_in, summary_step
from research_dp.runs.manifest import Manifest
from research_dp.strategies import TrainSpec
from research_dp.types import Bound, DataIdentity, DataSet


def check_resumable(
    manifest: Manifest,
    folder: Path,
    num_steps: int,
    spec: TrainSpec,
    data: DataSet,
    objects: Mapping[str, str],
) -> None:
    """Refuses, by UsageError, to resume a run with another order of examples or past its end.

    Also without an object that it was given: `objects` has what is bound in place of them, by
    parameter of `train`.
    """
    old, new = map(bindings_in, (manifest.origin.get("config", ""), gin.config_str()))
    for name, reference in objects.items():
        if old.get(f"train.{name}") == reference != new.get(f"train.{name}"):
            raise UsageError(
                f"train.{name} of the run in {files.shown(folder)} was given as a Python object. "
                f"Continue it by research_dp.run(..., {name}=...), or use another --workdir."
            )
    if manifest.step > num_steps:
        raise UsageError(
            f"the run in {files.shown(folder)} is at step {manifest.step}, past train.num_steps = "
            f"{num_steps}. Use another --workdir, or raise train.num_steps.",
            binding="train.num_steps",
        )
    saved = manifest.progress
    for name, before, now in (
        ("batch_size", saved.batch_size, spec.batch_size),
        ("seed", saved.seed, spec.seed),
        ("data", saved.order, data.order),
    ):
        if before != now:
            raise UsageError(
                f"the run in {files.shown(folder)} has train.{name} = {before}, not {now}: its "
                "order of examples would break. Use another --workdir, or the same value.",
                binding=f"train.{name}",
            )


def check_same_data(now: DataIdentity | None, saved: DataIdentity | None, run: str) -> None:
    """Refuses, by UsageError, to resume a run on other data, where both are known."""
    if now and saved and (difference := saved.difference(now)):
        name, was, is_ = difference
        raise UsageError(
            f"{run} was trained on other data: {name} was {was}, and is {is_} now.\n"
            "  Put back the data (tfds_data.data_dir, TFDS_DATA_DIR), or use another --workdir."
        )


def check_new(folder: Path, config: str) -> None:
    """Refuses to start among records of a run whose checkpoints are lost; in every process."""
    problem, checkpoints = None, folder / files.CHECKPOINTS
    records = (files.RECORDS, files.SUMMARY) if jax.process_index() == 0 else ()
    if names := [name for name in records if files.has_content(folder / name)]:
        before = folder / files.CONFIG
        same = before.exists() and before.read_bytes() == config.encode(errors="surrogateescape")
        what = f"{files.shown(folder)} has records of a run ({' and '.join(names)})"
        elsewhere = "another --workdir, or move the records away."
        if not (checkpoints / files.NOTHING_SAVED).is_file():
            problem = (
                f"{what}, and no checkpoint in {checkpoints}. Put back or mount the checkpoints "
                f"to continue it; to begin anew use {elsewhere}"
            )
        elif not same:
            problem = (
                f"{what} that saved nothing and had another configuration ({files.CONFIG}). Use "
                f"that configuration, or {elsewhere}"
            )
    if problem := first_problem(problem):
        raise UsageError(problem)


def is_finished(folder: Path, step: int) -> bool:
    """Whether `summary.json` is of this step; the same answer in every process."""
    finished = summary_step(folder) == step
    # Other processes may see the file later than process 0, or a part of it.
    return bool(of_the_first(int(finished)))


def changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    bound: Mapping[str, Bound] | None = None,
) -> list[str]:
    """A line for each binding, version, or number of devices or processes that differs."""
    old, new = _settings(before), _settings(now)
    lines = []
    for name in new | old:
        was, is_ = old.get(name, "unbound"), new.get(name, "unbound")
        if was != is_:
            binding = bound.get(name) if bound and name in new else None
            place = binding.place if binding else None
            lines.append(f"{name}: {was} -> {is_}" + (f"  ({place})" if place else ""))
    return lines


def _settings(origin: Mapping[str, Any]) -> dict[str, str]:
    """Everything that can change, as name -> text."""
    settings = bindings_in(origin.get("config", ""))
    counts = {name: str(origin[name]) for name in ("devices", "processes") if name in origin}
    versions = {f"version of {k}": str(v) for k, v in origin.get("versions", {}).items()}
    return settings | counts | versions
