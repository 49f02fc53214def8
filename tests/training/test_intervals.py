"""The steps that a run profiles."""

import jax
import pytest

from research_dp.training.intervals import ProfilerTrace


@pytest.mark.parametrize(
    ("at", "traced"), [(None, []), (3, [4, 5, 6, 7, 8]), (8, [9, 10]), (10, [])]
)
def test_a_profile_is_of_the_next_five_steps_at_most(tmp_path, monkeypatch, at, traced):
    folders, seen = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", folders.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", folders.clear)
    trace = ProfilerTrace(at, tmp_path)
    for step in range(1, 11):
        seen += [step] * len(folders)
        trace.step(step)
    trace.close()
    assert seen == traced and not folders
