"""The position of a training stream whose iterable has a state: saved, and restored."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from research_dp.distributed.mesh import texts_of_all
from research_dp.errors import binding_error, first_line
from research_dp.types import Arrays, DataSet, TrainOrder

# What reads and what sets a state: of Grain, and of PyTorch and Hugging Face.
_METHODS = ("get_state", "set_state"), ("state_dict", "load_state_dict")


class StreamPosition:
    """Where a data set's stream is after the steps that were taken; `data` begins there.

    Batches are read ahead, so the state after each is noted. Without a state there is no position.
    """

    def __init__(self, data: DataSet, saved: Sequence[str]):
        if saved and len(saved) != jax.process_count():
            problem = f" has a state in each of {len(saved)} processes: start as many."
            raise binding_error("train.data", problem)
        self.data = dataclasses.replace(data, train=self._train)
        self._given, self._now = data, saved[jax.process_index()] if saved else ""
        self._after: dict[int, str] = {}

    def taken(self, step: int) -> None:
        """A step has taken its batch."""
        self._now = self._after.pop(step, "")

    def of_all(self) -> tuple[str, ...]:
        """The position in each process, for a checkpoint."""
        return tuple(texts_of_all(self._now)) if self._now else ()

    def _train(self, order: TrainOrder) -> Iterator[Arrays]:
        first, saved = order.first_step, self._now
        # What is moved to a state begins at step 0.
        batches: Any = self._given.train(
            dataclasses.replace(order, first_step=0) if saved else order
        )
        found = ([getattr(batches, name, None) for name in names] for names in _METHODS)
        get, move = next((x for x in found if all(map(callable, x))), (None, None))
        if saved:
            try:
                if move is None:
                    raise TypeError("it has no set_state any more")
                move(json.loads(saved, object_hook=_bytes_again))
            except Exception as error:
                problem = f" cannot continue at the state {saved}: {first_line(error)}"
                raise binding_error("train.data", problem) from error
        for step, batch in enumerate(batches, first + 1):
            if get is not None and (saved or not first):  # else it began elsewhere than at step 0
                self._after[step] = _text_of(get())
            yield batch


def _text_of(state: Any) -> str:
    def plain(x: Any) -> Any:
        if isinstance(x, bytes):
            return {"base64": base64.b64encode(x).decode()}
        problem = f": the state of its stream has a {type(x).__name__}, neither bytes nor JSON."
        raise binding_error("train.data", problem)

    text = json.dumps(state, default=plain)
    if json.loads(text, object_hook=_bytes_again) != state:
        problem = ": the state of its stream changes as JSON: give dicts by text, and lists."
        raise binding_error("train.data", problem)
    return text


def _bytes_again(x: Any) -> Any:
    return base64.b64decode(x["base64"]) if x.keys() == {"base64"} else x
