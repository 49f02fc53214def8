"""Checks of the data while it is read: the same in all processes, within the model's bounds."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.distributed.mesh import texts_of_all
from research_dp.errors import UsageError, binding_error
from research_dp.strategies import TrainSpec
from research_dp.types import Arrays, DataIdentity, DataSet, EvalOrder, TrainableModel, TrainOrder

_BYTES_OF_PLACE = 16  # of an example: its place in the order, its key


def shared_identity(data: DataSet) -> DataIdentity | None:
    """The prepared data's identity, if any; a collective, which refuses different data in all."""
    local = data.identity() if data.identity else None
    texts = texts_of_all(json.dumps(dataclasses.asdict(local) if local else None))
    identities = [text and DataIdentity.from_json(text) for text in map(json.loads, texts)]
    for process, other in enumerate(identities):
        if other and identities[0] and (difference := identities[0].difference(other)):
            name, first, here = difference
            raise UsageError(
                f"processes read different data of {data.name}: {name} is {first} in process 0 and "
                f"{here} in process {process}.\n  Give all of them the same folder "
                "(tfds_data.data_dir, TFDS_DATA_DIR), or prepare the data anew where it differs."
            )
    return local


def check_memory(spec: TrainSpec) -> None:
    """Raises UsageError for batches that this machine's memory cannot hold."""
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in spec.example.values())
    rows = spec.batch_size / jax.process_count()
    needed = 2 * rows * (nbytes + _BYTES_OF_PLACE)  # one is read while one is trained on
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise binding_error(
            "train.batch_size",
            f" = {spec.batch_size:,}: two batches take {needed / 1e9:,.1f} GB in a process, and "
            f"this machine has {present / 1e9:,.1f} GB. Bind fewer examples.",
        )


def checked_batches(
    data: DataSet, order: TrainOrder | EvalOrder, model: TrainableModel
) -> Iterator[Arrays]:
    """This process's rows of each batch, whose integers are within `TrainableModel.bounds`.

    Out of bounds, an embedding or a loss would read NaN, or the numbers of another class. What has
    no weight is not checked. UsageError: a value is out of bounds, a batch lacks an array that the
    model bounds, or batches are too few.
    """
    if isinstance(order, TrainOrder):
        batches, split = data.train(order), "training"
        first, end = order.first_step, order.num_steps
    else:
        batches, split, first, end = data.evaluate(order), "evaluation", 0, 1
    number = first - 1
    for number, batch in enumerate(batches, first):
        if missing := sorted(model.bounds.keys() - batch.keys()):
            raise UsageError(
                f"the {split} data of {data.name} has no {missing[0]!r}; train.model takes 0 to "
                f"{model.config[model.bounds[missing[0]]] - 1} of it. "
                f"Its arrays: {', '.join(batch) or 'none'}."
            )
        for name, fact in model.bounds.items():
            values, limit = np.asarray(batch[name]), model.config[fact]
            if not values.size or (values.min() >= 0 and values.max() < limit):
                continue
            wrong = _counted((values < 0) | (values >= limit), batch, name, model)
            if found := _first_of(wrong, values, name, data, order, number):
                raise UsageError(
                    f"{found}, and train.model takes 0 to {limit - 1} ({fact} = {limit}).\n"
                    f"  Mend the data set, or the model's {fact}; what this run saved is untouched."
                )
        yield batch
    if number + 1 < end:
        raise UsageError(
            f"{data.name} has no {split} batch {number + 2}: its {split} data is empty, or "
            "its function returned too early."
        )


def nonfinite_example(
    data: DataSet,
    model: TrainableModel,
    order: TrainOrder | EvalOrder,
    number: int,
    batch: Arrays,
) -> str | None:
    """The first example of batch `number` that is not finite, e.g. 'example 7 ... has x nan'."""
    for name, values in ((name, np.asarray(x)) for name, x in batch.items()):
        if jnp.issubdtype(values.dtype, jnp.inexact):
            wrong = _counted(~np.isfinite(values), batch, name, model)
            if found := _first_of(wrong, values, name, data, order, number):
                return found
    return None


def _counted(wrong: np.ndarray, batch: Arrays, name: str, model: TrainableModel) -> np.ndarray:
    """Without the elements of an array of the batch that have no weight."""
    if model.counted is not None:
        return wrong & model.counted({k: np.asarray(x) for k, x in batch.items()}, name)
    if "mask" in batch and np.ndim(batch["mask"]) == 1:  # one of more dims is the model's own
        return wrong & (np.reshape(batch["mask"], (-1, *[1] * (wrong.ndim - 1))) > 0)
    return wrong


def _first_of(
    wrong: np.ndarray,
    values: np.ndarray,
    name: str,
    data: DataSet,
    order: TrainOrder | EvalOrder,
    number: int,
) -> str | None:
    """Which example of batch `number` has the first wrong value of an array, and the value."""
    for row, *place in np.argwhere(wrong)[:1]:
        index = number * order.batch_size + int(order.rows[row])
        split = "training" if isinstance(order, TrainOrder) else "evaluation"
        where = f"example {index} of the {split} stream of {data.name}"
        where = data.locate(order, index) if data.locate else where
        return f"{where} has {name} {values[(row, *place)]}"
    return None
