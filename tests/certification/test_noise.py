"""What rounding explains over a run: it covers right strategies, and a bug lies outside."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import optax
import pytest

import research_dp
from examples import planted_bugs as bugs
from research_dp.certification import harness
from research_dp.certification.harness import Bench
from research_dp.certification.noise import (
    PARAMETER,
    Noise,
    NoisyTrajectories,
    measure,
    train_batches,
)
from research_dp.certification.tolerances import named
from research_dp.config import load
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError
from research_dp.strategies import sync_gradients
from research_dp.strategies.strategy import init_key
from research_dp.training.train import configured
from research_dp.types import EvalOrder
from tests.support import certified, runs
from tests.support.certified import BATCH, bench_of, noise

STEPS = 6


def hand_made(spread=(0.0,) * 40, size=2.0):
    steps = len(spread)
    flat = np.full(steps, size)
    return Noise(flat, flat / 2, np.array(spread), np.zeros(steps), {"a/b": (0.5, 2.0)}, 2**-23)


def test_a_records_bound():
    """Noise that begins soon after a record counts for it: two runs part at different steps."""
    made = hand_made(spread=[0.0] * 25 + [1e-3] * 15)
    before = made.allowed_record("loss", 0, 10)
    assert 0 < before < 1e-5, "the rounding of the figure alone"
    assert made.allowed_record("loss", 10, 20) == pytest.approx(10 * 1e-3, rel=0.01)
    assert made.allowed_record("loss", 30, 40) == pytest.approx(10 * 1e-3, rel=0.01)
    assert made.allowed_record("grad_norm", 30, 40) < 1e-5
    for first, last in ((5, 5), (30, 41), (-1, 3)):
        with pytest.raises(ValueError, match="of 40 measured"):
            made.allowed_record("loss", first, last)


def one_percent(grads, axes):
    """The mean over the devices."""
    return jax.tree.map(lambda x: 1.01 * x, sync_gradients(grads, axes))


def run(bench):
    """Loss and gradient norm of each step, and the last parameters."""
    state, figures = bench.strategy.init(init_key(bench.spec.seed)), []
    for batch in train_batches(bench, noise(), STEPS):
        state, metrics = harness.take_step(bench.strategy, state, batch)
        figures.append([harness.mean(metrics[name]) for name in ("loss", "grad_norm")])
    return np.array(figures), by_path(harness.to_host(state.params))


def excess(found, one, other):
    """Differences of two runs over their bounds: the loss, the norm, the worst parameter."""
    (a, params), (b, others) = one, other
    apart = np.abs(a.mean(0) - b.mean(0))
    records = [found.allowed_record(metric, 0, STEPS) for metric in ("loss", "grad_norm")]
    distances = [
        np.linalg.norm(params[path] - others[path]) / allowed
        for path, (allowed, _) in found.params.items()
    ]
    return *(apart / records), max(distances)


@pytest.mark.slow
def test_it_covers_rounding_and_no_bug():
    """Dropout, masks and two micro-batches: the keys are the run's own in all trajectories."""
    sgd = {"spec": {"optimizer": optax.sgd(0.1), "accumulation_steps": 2}}
    right = bench_of("ddp", **sgd)
    found = measure(right, noise(), steps=STEPS)
    assert found.steps == STEPS
    expected = run(dataclasses.replace(right, config=right.against))
    np.testing.assert_allclose(found.loss, expected[0][:, 0], rtol=1e-6)
    assert max(excess(found, run(right), expected)) < 1
    wrong = bench_of("ddp", sync=one_percent, **sgd)
    assert excess(found, run(wrong), expected)[1] > 100
    wrong = bench_of("hsdp", sync=bugs.inside_groups_alone, **sgd)
    assert min(excess(found, run(wrong), expected)) > 2


def test_a_run_that_is_not_finite_cannot_be_measured():
    wild = bench_of("single", spec={"optimizer": optax.sgd(1e30)})
    with pytest.raises(UsageError, match=r"after \d steps .* (norm|parameter) is not finite"):
        measure(wild, noise(), steps=STEPS)


def test_a_step_that_is_skipped_moves_no_trajectory():
    bench = bench_of("single", spec={"skip_nonfinite": True})
    start = harness.to_host(bench.oracle.init(init_key(bench.spec.seed)))
    good, bad = train_batches(bench, noise(), 2)
    bad["image"][:] = np.nan
    trajectories = NoisyTrajectories(bench, start, 1)
    oracle = harness.run_step(bench.oracle, start, good)
    before, after = (trajectories.step(start, oracle, batch)[1] for batch in (good, bad))
    for key in named(PARAMETER, start.params):
        np.testing.assert_array_equal(after[key], before[key], err_msg=str(key))


def test_parameters_may_be_four_elements_by_a_full_update_apart_besides_noise():
    trajectories = NoisyTrajectories(types.SimpleNamespace(precision=2**-23), None, 0)
    before = types.SimpleNamespace(params={"w": np.zeros(4, np.float32)})
    after = types.SimpleNamespace(params={"w": np.float32([0.1, 0.2, 0.3, -0.4])})
    oracle = types.SimpleNamespace(metrics={"loss": (1, 1), "grad_norm": (1, 1)}, state=after)
    (reference,) = trajectories.step(before, oracle, {})
    key, w = (PARAMETER, "w"), after.params["w"]
    trajectories.add_pairs([({**reference, key: w + np.float32(1e-3)}, reference)])
    rounding = 16 * 2**-23 * np.linalg.norm(w)
    assert trajectories.allowed(key, w) == pytest.approx(10 * 2e-3 + 4 * 0.4 + rounding)
    assert trajectories.factor(key) == 2


LONG, EVERY = 60, 20  # steps: rounding is amplified after 40
DIGITS = ("gin/runs/digits.gin", "gin/strategies/single.gin")
RUNS = {  # flags after the run's file
    "single": ["--gin_file=gin/strategies/single.gin"],
    "fsdp": ["--gin_file=gin/strategies/fsdp.gin"],
    "spmd": ["--gin_file=gin/strategies/spmd.gin"],
    "a bug": [
        "--gin_file=gin/strategies/ddp.gin",
        "--import=tests.support.faults",
        "--gin.data_parallel.sync=@ascending",
    ],
}


@pytest.mark.exhaustive
def test_finished_runs_of_digits(command, tmp_path, data_dir, monkeypatch):
    """As users compare runs: their records and, of those that are right, parameters."""
    records, params = {}, {}
    for name, flags in RUNS.items():
        settings = [f"--gin.train.num_steps={LONG}", f"--gin.train.log_every={EVERY}"]
        folder = tmp_path / name
        flags = [f"--gin_file={DIGITS[0]}", *flags, *settings, "--cpu_devices=8"]
        done = command(*flags, f"--workdir={folder}")
        assert done.returncode == 0, done.stderr
        records[name] = runs.records(folder, "train")
        if name != "a bug":
            params[name] = by_path(research_dp.load(folder).params)
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    load.load(list(DIGITS), [f"train.num_steps = {LONG}"])
    single, spec, data, _ = configured()
    found = measure(Bench(config=single, against=single, spec=spec), data, steps=LONG)

    def worst(one, other, metric):
        apart = (
            abs(a[metric] - b[metric]) / found.allowed_record(metric, a["step"] - EVERY, a["step"])
            for a, b in zip(records[one], records[other], strict=True)
        )
        return max(apart)

    for one, other in itertools.combinations(params, 2):
        assert worst(one, other, "loss") < 1, (one, other)
        assert worst(one, other, "grad_norm") < 1, (one, other)
        for path, (allowed, norm) in found.params.items():
            apart = np.linalg.norm(np.float64(params[one][path]) - params[other][path])
            assert apart < allowed < norm, (one, other, path)
    for name in params:
        assert worst(name, "a bug", "loss") > 10
        assert worst(name, "a bug", "grad_norm") > 2


def test_data_that_end_before_the_steps():
    """Bounds of fewer steps than were asked for would look like those of the run."""

    def train(order):
        yield from itertools.islice(noise().train(order), 1)

    with pytest.raises(UsageError, match="noise ends after 1 of 6 steps"):
        measure(bench_of("single"), dataclasses.replace(noise(), train=train), steps=STEPS)


@pytest.mark.slow
def test_the_bound_of_an_evaluation_covers_rounding_and_no_bug():
    """As training's: it is that of a mean over all evaluation batches, padding masked."""

    def evaluate(order):
        for seed in range(6):
            yield certified.examples(seed, order.batch_size)

    data = dataclasses.replace(noise(), evaluate=evaluate)
    bench = bench_of("ddp", spec={"optimizer": optax.sgd(0.1)})
    found = measure(bench, data, steps=STEPS, evaluated=[2, STEPS])
    assert found.evaluations.keys() == {2, STEPS}
    assert measure(bench, data, steps=1).evaluations == {}
    batches = list(evaluate(EvalOrder(batch_size=BATCH, rows=np.arange(BATCH))))

    def means(strategy):
        state = strategy.init(init_key(bench.spec.seed))
        for batch in train_batches(bench, data, STEPS):
            state, _ = harness.take_step(strategy, state, batch)
        sums = harness.evaluate(strategy, state, batches)
        return {name: harness.mean(pair) for name, pair in sums.items()}

    expected = means(bench.oracle)
    for name, value in means(bench.strategy).items():
        allowed = found.evaluations[STEPS][name]
        assert abs(value - expected[name]) < allowed, name
        # One label of the six batches' examples decides more than rounding; the loss is finer.
        assert allowed < (1e-4 if name == "loss" else 0.05), name
