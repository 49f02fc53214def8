"""Streams with a state: a run that ends at once continues at the batch that is next."""

import dataclasses
import json

import grain
import numpy as np
import pytest

from tests.support import tiny_run


def examples(order, seed=0):
    """A shuffled stream of Grain, which says nothing of the step that it begins with."""
    x = np.random.default_rng(seed).normal(size=(50, tiny_run.DIM)).astype(np.float32)
    rows = grain.MapDataset.source([{"x": row} for row in x]).shuffle(seed=order.seed).repeat()
    return rows.batch(order.batch_size).to_iter_dataset()


class Stateful:
    """An iterable whose state is of bytes or text, read and set by other names."""

    def __init__(self, order, kind):
        self.rows, self.kind, self.next = iter(examples(order)), kind, 0

    def __iter__(self):
        for batch in self.rows:
            self.next += 1
            yield batch

    def state_dict(self):
        kinds = {"bytes": b"\xff" * self.next, "text": {"at": self.next, "of": None}}
        return {"state": kinds.get(self.kind, {1, 2})}

    def load_state_dict(self, read):
        self.next = len(read["state"]) if self.kind == "bytes" else read["state"]["at"]
        for _ in range(self.next):
            next(self.rows)


STREAMS = {
    "grain": lambda order: iter(examples(order)),
    **{kind: lambda order, kind=kind: Stateful(order, kind) for kind in ("bytes", "text")},
}


def run(folder, stream, **options):
    return tiny_run.outcome(
        folder, data=dataclasses.replace(tiny_run.DATA, train=stream), **options
    )


def fingerprint(folder):
    return json.loads((folder / "summary.json").read_text())["params_fingerprint"]


@pytest.mark.parametrize("kind", STREAMS)
def test_a_run_that_was_ended_at_once_continues_at_the_next_batch(kind, tmp_path):
    def end(record):
        if record["step"] == 6:
            raise RuntimeError("ended")

    assert run(tmp_path / "whole", STREAMS[kind]) == (0, "")
    for number in (5, 8):  # in the middle of what is read ahead, and again at the end
        status, said = run(tmp_path / "parts", STREAMS[kind], on_record=end, num_steps=number)
        assert status == (number == 8), said
    assert run(tmp_path / "parts", STREAMS[kind]) == (0, "")
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")


def test_mistakes_of_a_stream_are_told(tmp_path):
    status, said = run(tmp_path / "set", lambda order: Stateful(order, "set"))
    assert status == 2 and "state of its stream has a set, neither bytes nor JSON" in said
    assert run(tmp_path, STREAMS["bytes"], num_steps=2) == (0, "")
    status, said = run(tmp_path, STREAMS["text"])
    assert status == 2 and "cannot continue at the state {" in said
    status, said = run(tmp_path, lambda order: (x for x in examples(order)))
    assert status == 2 and "it has no set_state any more" in said
