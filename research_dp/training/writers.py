"""Where records go besides the run's own files: W&B, MLflow, own writers, `train.on_record`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import secrets
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import gin
import jax

from research_dp.argument_checks import check_arguments, checked
from research_dp.distributed.mesh import first_problem
from research_dp.errors import RunFailure, UsageError, at_end, binding_error, message_of
from research_dp.runs import files
from research_dp.runs.facts import bindings_in


@runtime_checkable
class MetricWriter(Protocol):
    """What a run calls of CLU's class of this name, whose module imports TensorFlow."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Writers:
    """The writers of a run, and `on_record`; process 0 calls them. RunFailure: one raised."""

    def __init__(
        self,
        functions: Sequence[Callable[[Path], MetricWriter]] = (),
        on_record: Callable[[Mapping[str, Any]], Any] | None = None,
    ):
        names = [getattr(f, "gin_name", getattr(f, "__name__", repr(f))) for f in functions]
        if twice := [name for name in names if names.count(name) > 1]:
            raise binding_error("train.writers", f" has {twice[0]} twice: leave one out.")
        self._functions, self._on_record = dict(zip(names, functions, strict=True)), on_record
        self._opened: dict[str, MetricWriter] = {}

    def open(self, folder: Path) -> None:
        """Opens the writers of a run; every process calls it. UsageError: one cannot be opened."""
        problem = None
        try:
            for name in self._functions if jax.process_index() == 0 else ():
                writer = self._functions[name](folder)
                check_arguments("train", {"writers": writer}, {"writers": MetricWriter})
                self._opened[name] = writer
        except Exception as error:  # of any library
            problem = f"train.writers: {name} cannot be opened: {_said(error)}"
            if isinstance(error, ImportError) and error.name == name:
                problem += f" Do: pip install 'research_dp[{name}]'"
        if problem := first_problem(problem):
            raise UsageError(problem, binding="train.writers")

    def write(self, record: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        """Gives the writers a record's scalars as 'split/name', and `on_record` the record."""
        where = f"the {record['split']} record of step {record['step']}"
        named = {f"{record['split']}/{name}": x for name, x in scalars.items()}
        for name in self._opened:
            self._call(name, "write_scalars", where, record["step"], dict(named))
        if self._on_record:
            _blamed("train.on_record", where, self._on_record, types.MappingProxyType(record))

    def end(self, method: str = "close") -> None:
        """Closes all, or flushes them, also those after one that raises an error."""
        with contextlib.ExitStack() as stack:
            for name in self._opened:
                stack.enter_context(at_end(functools.partial(self._call, name, method, method)))

    def _call(self, name: str, method: str, where: str, *arguments: Any) -> None:
        _blamed(f"train.writers: {name}", where, getattr(self._opened[name], method), *arguments)


def _blamed(what: str, where: str, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        result = function(*arguments)
    except Exception as error:  # of any library or user
        raise RunFailure(f"{what} raised an error at {where}: {_said(error, function)}") from error
    if inspect.iscoroutine(result):
        result.close()
        raise UsageError(f"{what} is async, and nobody awaits it: use `def`.")


def _said(error: Exception, function: Any = None) -> str:
    """An error with its innermost place, in the file of a function if it passed there."""
    if isinstance(error, UsageError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    place = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{type(error).__name__}: {message_of(error)} ({place.filename}:{place.lineno})."


def _identity(folder: Path, tracker: str, begin: Callable[[], str]) -> str:
    """What a tracker calls the run in a folder, from `begin` if the run is new to it."""
    file = folder / files.TRACKERS
    known = files.read_json(file.read_bytes()) if file.is_file() else {}
    if tracker not in known:
        known[tracker] = begin()
        files.replace(file, files.json_text(known) + "\n")
    return known[tracker]


@gin.register("wandb", module="writers")
@checked
class WandbWriter:
    """Writes records to Weights & Biases; a continued run goes on in its run there.

    A record is a row, with its step as `step`. W&B's own steps count rows: it drops rows of earlier
    steps, and a killed run repeats some.

    Args:
        folder: Of the run; W&B's files go there.
        project, entity, group: As in `wandb.init`; None: what W&B's variables say.
        name: Of the run; None: that of its folder.
    """

    gin_name = "wandb"

    def __init__(
        self,
        folder: Path,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        name: str | None = None,
    ):
        import wandb

        self._run = wandb.init(
            project=project,
            entity=entity,
            group=group,
            name=name or folder.name,
            dir=folder,
            id=_identity(folder, "wandb", lambda: secrets.token_hex(8)),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off"),
        )
        self._run.config.update(bindings_in(gin.config_str()), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def flush(self) -> None: ...  # another process has each row

    def close(self) -> None:
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


@gin.register("mlflow", module="writers")
@checked
class MlflowWriter:
    """Writes records to MLflow; a continued run goes on in its run there.

    Args:
        folder: Of the run, which is called like it.
        tracking_uri: MLflow's; None: that of MLFLOW_TRACKING_URI.
        experiment: MLflow's, which is made if there is none of this name.
    """

    gin_name = "mlflow"

    def __init__(
        self, folder: Path, tracking_uri: str | None = None, experiment: str = "research_dp"
    ):
        import mlflow

        self._client, self._metric = mlflow.MlflowClient(tracking_uri), mlflow.entities.Metric
        self._id = _identity(folder, "mlflow", lambda: self._begin(folder.name, experiment))
        self._client.update_run(self._id, status="RUNNING")

    def _begin(self, name: str, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        of = found.experiment_id if found else self._client.create_experiment(experiment)
        run = self._client.create_run(of, run_name=name).info.run_id
        for parameter, value in bindings_in(gin.config_str()).items():
            self._client.log_param(run, parameter, value)
        return run

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics)

    def flush(self) -> None: ...  # each record was sent

    def close(self) -> None:
        status = "FAILED" if sys.exc_info()[0] else "FINISHED"
        self._client.set_terminated(self._id, status)
