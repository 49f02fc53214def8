"""Tokens without data: a function of seed and place, on any number of processes."""

import itertools

import numpy as np
import pytest

from research_dp.data import random_tokens
from research_dp.errors import UsageError
from research_dp.types import EvalOrder, TrainOrder

DATA = random_tokens(length=16, vocab_size=50, eval_examples=10)


def tokens(rows, seed=0, first=0, last=3, size=8):
    order = TrainOrder(
        seed=seed, batch_size=size, rows=np.asarray(rows), first_step=first, num_steps=last
    )
    return [batch["tokens"] for batch in DATA.train(order)]


def test_a_batch_does_not_depend_on_who_reads_it_or_where_a_run_continues():
    whole = tokens(range(8))
    parts = zip(tokens([0, 1, 2, 3]), tokens([4, 5, 6, 7]), strict=True)
    for expected, both in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(expected, np.concatenate(both))
    np.testing.assert_array_equal(whole[2], tokens(range(8), first=2)[0])
    # The stream is the same whatever the size of a batch.
    np.testing.assert_array_equal(
        np.concatenate(whole), np.concatenate(tokens(range(4), last=6, size=4))
    )


def test_no_two_examples_or_seeds_are_alike_and_all_tokens_occur():
    drawn = np.concatenate([*tokens(range(8)), *tokens(range(8), seed=1)])
    assert all((a != b).any() for a, b in itertools.combinations(drawn, 2))
    assert set(np.unique(drawn)) == set(range(50))
    assert drawn.dtype == DATA.example["tokens"].dtype
    assert drawn.shape[1:] == DATA.example["tokens"].shape


def test_evaluation_counts_each_example_once_the_same_for_every_seed():
    found = [list(DATA.evaluate(EvalOrder(batch_size=8, rows=np.arange(8)))) for _ in range(2)]
    assert [batch["mask"].sum() for batch in found[0]] == [8, 2]
    for one, again in zip(*found, strict=True):
        np.testing.assert_array_equal(one["tokens"], again["tokens"])
    seen = [*found[0][0]["tokens"], *np.concatenate(tokens(range(8)))]
    assert all((a != b).any() for a, b in itertools.combinations(seen, 2)), "trained on"


def test_counts_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match=r"random_tokens\.length = 0"):
        random_tokens(length=0, vocab_size=2)
