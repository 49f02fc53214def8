"""`certify` passes what is right, and finds each planted bug by its leaf or cause."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from examples import planted_bugs as bugs
from examples.error_feedback import ErrorFeedback
from research_dp import PLAIN, gather_params, sync_gradients
from research_dp.certification.certify import AFTER, certify
from research_dp.certification.compare_steps import compare_step, conserved
from research_dp.certification.harness import to_host
from research_dp.config import gin_internals, load
from research_dp.distributed.collectives import takes
from research_dp.distributed.mesh import one_device_mesh
from research_dp.errors import UsageError
from research_dp.models import convnet, mlp, transformer
from tests.support.certified import STEPS, bench_of, examples, noise, refusal, small_model
from tests.support.marks import exhaustive, slow
from tests.support.repository import stems

TWO_AXES = "make_mesh.axes = {'data': 4, 'fsdp': 2}"  # replication is tracked over both
TWO = {"spec": {"accumulation_steps": 2}}
SENT = {"dtypes": ("bfloat16",)}
COARSE = {"bindings": ["sync_gradients.dtype = 'bfloat16'"], **SENT}
# docs/spot_the_bug.md has six more: its test compares what `certify` says of each word by word.
BUGS = {
    "summed": ("ddp", {"sync": bugs.summed}, "8 times .*: summed instead of averaged over all dev"),
    "averaged twice": ("ddp", {"sync": bugs.averaged_twice}, "0.125 times .*: averaged twice over"),
    "stale gather before the forward pass": (
        "fsdp",
        {"engine": bugs.one_step_behind},
        "those of the parameters of the step before: a stale gather",
    ),
    "one device's data repeated": (
        "fsdp",
        {"engine": bugs.repeated_data},
        r"examples of device 1 do not count \(places 4 to 7",
    ),
    "double reduction": (
        "ddp",
        {"engine": bugs.checked_replication, "sync": bugs.mean_of_sums, "bindings": [TWO_AXES]},
        r"8 times .* under check_vma=True autodiff has summed",
    ),
    "cast on the wire": ("ddp", {"sync": bugs.cast_on_the_way}, "sends bfloat16, which nothing"),
    "summed, in bfloat16": ("ddp", {"sync": bugs.summed, **COARSE}, "8 times .*: summed instead"),
    "a little too small, in bfloat16": (
        "ddp",
        {"sync": bugs.one_shrunk, **COARSE},
        r"gradient size hidden_0/kernel.*\| gradient hidden_0/kernel: 0.985 times",
    ),
    "state of one shard": (
        "fsdp",
        {"update": bugs.one_shard_not_updated},
        r"state is not updated on device \(data 0 fsdp 3\)",
    ),
    "one gradient summed": (
        "zero1",
        {"sync": bugs.one_summed},
        r"gradient head/bias: 8 times .* summed instead of averaged",
    ),
    "a decay of its own": (
        "zero1",
        {"update": bugs.decayed},
        r"parameter head/kernel.*\| .*parameter head/kernel is also scaled, by 1 -1.0e-04",
    ),
    "learning rate times devices": (
        "fsdp",
        {"update": bugs.eightfold},
        "updated by 8 times what the optimizer says",
    ),
    "accumulation not averaged": (
        "ddp",
        {"engine": bugs.micro_batches_summed, **TWO},
        "2 times .*: 2 micro-batches are summed, not averaged",
    ),
    "something kept between steps": (
        "fsdp",
        {"engine": bugs.drifting},
        "step 1, loss, in a row.*keeps something from step to step",
    ),
    "a little kept between steps, in bfloat16": (
        "ddp",
        {"engine": functools.partial(bugs.drifting, by=1.1), **COARSE},
        "step 1, .* in a row.*keeps something from step to step",
    ),
    "initial parameters": (
        "fsdp",
        {"engine": bugs.keyed_by_device},
        "before the first step, params/head/kernel has other bits.*one key",
    ),
}
QUICK = ("summed",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in BUGS]
)
def test_a_planted_bug_is_found_and_named(name):
    stem, options, pattern = BUGS[name]
    text = refusal(stem, **options)
    assert re.search(pattern, text), text


@pytest.mark.slow
def test_statistics_and_means_of_each_device_are_refused():
    model = convnet(features=(4,), hidden=8, num_classes=10, norm="batch")
    right = bench_of("ddp", spec={"model": model})
    done = certify(right, noise(), steps=STEPS)
    assert done.certified, done.as_json()["checks"]
    for wrong, cause in (
        (bugs.with_loss(model, bugs.own_statistics), "statistics are each device's own"),
        (
            bugs.with_loss(small_model(dropout_rate=0.0), bugs.mean_of_means),
            "a mean of each device's own means",
        ),
    ):
        assert cause in refusal("ddp", spec={"model": wrong})


@pytest.mark.parametrize(
    ("stem", "options"),
    [
        ("fsdp", {"spec": {"max_grad_norm": 0.1, "accumulation_steps": 2}}),
        pytest.param(
            "spmd_fsdp", {"spec": {"optimizer": optax.lamb(1e-2)}}, marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_right_is_certified(stem, options):
    done = certify(bench_of(stem, **options), noise(), steps=STEPS)
    assert done.certified, (done.first_difference, done.cause)
    checks = {check.name: check for check in done.checks}
    assert checks["saved and restored"].passed
    assert len(done.steps) == STEPS
    # The bounds are near to what happens: what is a hundred times as far off would be found.
    gradients = [d for r in done.steps for d in r.differences if d.kind == "gradient"]
    assert max(d.bound for d in gradients) < 200
    assert max(d.excess for d in gradients) > 0.01


class Shrunk(ErrorFeedback):
    def apply(self, grads, axis_names, *, state):
        grads, state = super().apply(grads, axis_names, state=state)
        return jax.tree.map(lambda x: x * 0.97, grads), state


def test_a_slot_with_state_begins_with_its_own():
    done = certify(bench_of("ddp", sync=ErrorFeedback(), **SENT), noise(), steps=STEPS, **SENT)
    assert done.certified, (done.first_difference, done.cause)
    checks = {check.name: check.passed for check in done.checks}
    assert checks["initial state"] and checks["copies"] and checks["saved and restored"]


@pytest.mark.slow
def test_a_planted_bug_is_found_in_a_slot_with_state():
    assert "all gradients: 0.9" in refusal("ddp", sync=Shrunk(), **SENT)


class InEightBits(ErrorFeedback):
    """Values of eight bits, whose sums are not rounded."""

    algorithm = "gradients are rounded to eight bits"

    def apply(self, grads, axis_names, *, state):
        exact = jax.tree.map(jnp.add, grads, state["error"])
        sent = jax.tree.map(lambda x: x.astype("float8_e4m3fn").astype(x.dtype), exact)
        return sync_gradients(sent, axis_names), {"error": jax.tree.map(jnp.subtract, exact, sent)}


class Losing(InEightBits):
    """What was not sent is forgotten."""

    def apply(self, grads, axis_names, *, state):
        return super().apply(grads, axis_names, state=jax.tree.map(jnp.zeros_like, state))


@pytest.mark.parametrize("slot", [InEightBits, Losing])
def test_no_gradient_is_lost_in_a_slot_that_keeps_what_is_pending(slot):
    """Numbers of another algorithm are not judged, and this is."""
    done = certify(bench_of("ddp", sync=slot()), noise(), steps=3)
    checks = {check.name: check.passed for check in done.checks}
    assert checks["gradient"] is None and checks["sent and pending"] is (slot is InEightBits)


def test_what_is_pending_is_not_judged_in_another_unit_than_the_losss():
    options = {"sync": InEightBits(), "sync_each": "micro_batch", "spec": {"accumulation_steps": 2}}
    bench = bench_of("ddp", **options)
    start = to_host(bench.oracle.init(0))
    step = compare_step(bench, 0, start, examples(0, bench.spec.batch_size))
    assert conserved(step) is None


def moves(steps=1, **slots):
    """A certificate of the configuration in examples/, and its checks of moved states."""
    load.load(["examples/ddp_error_feedback.gin"])
    config = dataclasses.replace(gin_internals.value_of("train.strategy"), **slots)
    bench = dataclasses.replace(bench_of("ddp", **SENT), config=config)
    done = certify(bench, noise(), steps=steps, **SENT)
    return done, {c.name: c for c in done.checks if c.name.startswith("moved")}


HALF = "moved to ddp_error_feedback on data 4 x fsdp 1"


def test_the_state_of_a_slot_is_moved_to_fewer_devices():
    # What is saved is the state after two steps: before the first, errors are zeros.
    done, checks = moves(steps=AFTER + 2)
    assert done.certified, (done.first_difference, done.cause)
    assert checks.pop(HALF)[1:] == (True, "the same bits")
    # The oracle has no errors to continue with.
    assert list(checks) == ["moved to single on data 1 x fsdp 1", "moved back from single"]
    for _, passed, message in checks.values():
        assert passed is None and message.startswith("not tried: ") and "sync" in message


class EverySecond(ErrorFeedback):
    """Gradients reach the optimizer each second step, averaged over both; states are a device's."""

    algorithm = "the optimizer gets the mean of two steps' gradients, each second step"
    pending, by_unit = None, False

    def __init__(self):
        super().__init__("float32")

    def init(self, params):
        return {"step": jnp.zeros((), jnp.int32), "sum": super().init(params)["error"]}

    def apply(self, grads, axis_names, *, state, reduction=PLAIN):
        total = jax.tree.map(jnp.add, state["sum"], grads)
        is_due = state["step"] % 2 == 1
        due = jax.tree.map(lambda x: jnp.where(is_due, x / 2, 0.0), total)
        kept = jax.tree.map(lambda x: jnp.where(is_due, 0.0, x), total)
        means = sync_gradients(due, axis_names, reduction=reduction)
        return means, {"step": state["step"] + 1, "sum": kept}

    def resize(self, state, devices):
        return jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (devices, *x.shape[1:])), state)


class NeverAveraged(EverySecond):
    def apply(self, grads, axis_names, *, state, reduction=PLAIN):
        return super().apply(grads, (), state=state, reduction=reduction)


def test_a_stateful_strategy_is_certified_against_itself_on_one_device():
    bench = bench_of("ddp")
    config = dataclasses.replace(bench.config, sync=EverySecond())
    one = dataclasses.replace(config, mesh=one_device_mesh(), name="itself")
    done = certify(dataclasses.replace(bench, config=config, against=one), noise(), steps=4)
    assert done.certified and done.algorithm is None, str(done)


class Keyed(EverySecond):
    """Its state begins with what the strategy gives it."""

    @takes("devices", "key", "shardings")
    def init(self, params, *, devices, key, shardings):
        jax.tree.map(lambda x, p: p.dim, params, shardings)
        assert devices["data"] >= 1 and key is not None
        return super().init(params)


@pytest.mark.slow
def test_a_state_that_begins_with_a_key_is_certified():
    bench = bench_of("ddp")
    config = dataclasses.replace(bench.config, sync=Keyed())
    one = dataclasses.replace(config, mesh=one_device_mesh(), name="itself")
    done = certify(dataclasses.replace(bench, config=config, against=one), noise(), steps=2)
    assert done.certified, str(done)


@pytest.mark.slow
def test_another_algorithm_is_said_in_place_of_a_verdict_with_what_is_known():
    bench = bench_of("ddp")
    config = dataclasses.replace(bench.config, sync=EverySecond())
    done = certify(dataclasses.replace(bench, config=config), noise(), steps=4)
    assert done.is_right and not done.certified
    text = str(done)
    assert text.startswith("ANOTHER ALGORITHM BY DESIGN: ddp on data 8 x fsdp 1 against single")
    assert f"Its numbers are not judged: {EverySecond.algorithm}." in " ".join(text.split())
    assert "gradient of the first step: " in text and "loss, in a row: " in text
    assert len(done.steps) == 4, "the distance is that of all steps"
    checks = {check.name: check.passed for check in done.checks}
    assert checks["copies"] and checks["saved and restored"] and checks["gradient"] is None
    assert done.as_json()["algorithm"] == EverySecond.algorithm
    wrong = dataclasses.replace(config, sync=NeverAveraged())
    done = certify(dataclasses.replace(bench, config=wrong), noise(), steps=2)
    assert not done.is_right, "copies must not differ, by whatever design"


def rounded_parameters(params, axis_name):
    """Gathered parameters, rounded to 1/4; the gradient is that of the rounded ones."""
    full = gather_params(params, axis_name)
    return jax.tree.map(lambda x: x + lax.stop_gradient(jnp.round(4 * x) / 4 - x), full)


rounded_parameters.algorithm = "parameters are gathered in multiples of 1/4"


@pytest.mark.slow
def test_an_evaluation_of_other_parameters_by_design_is_not_judged():
    bench = bench_of("fsdp")
    config = dataclasses.replace(bench.config, gather=rounded_parameters)
    done = certify(dataclasses.replace(bench, config=config), noise(), steps=2)
    assert done.is_right and not done.certified, str(done)
    assert {check.passed for check in done.checks if "evaluation" in check.name} == {None}


class Refusing(ErrorFeedback):
    def resize(self, state, devices):
        raise UsageError(f"no such errors on {devices} devices")


class Forgetting(ErrorFeedback):
    def resize(self, state, devices):
        return state


@pytest.mark.slow
def test_a_slot_that_refuses_to_move_is_not_tried_and_one_that_forgets_fails():
    done, checks = moves(sync=Refusing())
    assert done.certified
    assert checks[HALF][1:] == (None, "not tried: no such errors on 4 devices")
    done, checks = moves(sync=Forgetting())
    assert not done.certified
    holds, message = checks[HALF][1:]
    assert holds is False and "data_parallel.sync: its `resize` returned" in message


IN_CI = ("fsdp", "hsdp_zero1", "spmd_fsdp", "zero1")  # the others are much like one of them


@pytest.mark.parametrize("stem", [slow(s) if s in IN_CI else exhaustive(s) for s in stems()])
def test_every_shipped_strategy_is_certified(stem):
    model = mlp(api="nnx", widths=(32, 16), num_classes=10, dropout_rate=0.3)
    settings = {"model": model, "max_grad_norm": 0.1, "accumulation_steps": 2}
    done = certify(bench_of(stem, spec=settings), noise(), steps=STEPS)
    assert done.certified, (done.first_difference, done.cause)


@pytest.mark.parametrize("dtype", [exhaustive("float32"), slow("bfloat16")])
def test_a_language_model_with_units_is_certified(dtype):
    def tokens(order):
        rng = np.random.default_rng(0)
        while True:
            yield {"tokens": rng.integers(0, 64, (order.batch_size, 12)).astype(np.int32)}

    def masked(order):
        yield {**next(tokens(order)), "mask": np.ones(order.batch_size, np.float32)}

    example = {"tokens": jax.ShapeDtypeStruct((12,), np.int32)}
    data = dataclasses.replace(noise(), example=example, train=tokens, evaluate=masked)
    model = transformer(
        vocab_size=64, width=16, depth=2, heads=2, mlp_width=32, tied=True, dtype=dtype
    )
    settings = {"model": model, "example": example, "batch_size": 16, "max_grad_norm": 1.0}
    done = certify(bench_of("fsdp", spec=settings, dtypes=(dtype,)), data, steps=STEPS)
    assert done.certified, (done.first_difference, done.cause)


@pytest.mark.slow
def test_a_run_that_is_not_finite_is_not_certified():
    done = certify(bench_of("fsdp", spec={"optimizer": optax.sgd(1e30)}), noise(), steps=STEPS)
    assert not done.certified
    assert "the oracle's loss is nan at step" in str(done.first_difference)


@pytest.mark.slow
def test_a_step_that_both_skip_is_right():
    def train(order):
        for number, batch in enumerate(noise().train(order)):
            batch["image"][7] = np.nan if number == 1 else batch["image"][7]  # it has weight
            yield batch

    data = dataclasses.replace(noise(), train=train)
    spec = {"skip_nonfinite": True, "model": small_model(dropout_rate=0.0)}
    done = certify(bench_of("fsdp", spec=spec), data, steps=STEPS)
    assert done.certified, (done.first_difference, done.cause)
    assert done.steps[1].loss == 0.0, "it was not skipped"
