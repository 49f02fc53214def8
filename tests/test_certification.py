"""`certify` passes what is right, and finds each planted bug by its leaf or cause."""

import dataclasses
import json
import os
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planted_bugs as bugs
import pytest
from conftest import ROOT, stems

from research_dp.certification import costs, differences
from research_dp.certification.bench import Bench
from research_dp.certification.proof import certify
from research_dp.config import gin_config, gin_state
from research_dp.distributed.data_set import DataSet
from research_dp.models import convnet, mlp, transformer
from research_dp.strategies import TrainSpec

README = (ROOT / "README.md").read_text()
BATCH = 32
STEPS = 3


def examples(order_seed, size):
    """Noise to learn; masked so that devices have uneven numbers of examples that count."""
    rng = np.random.default_rng(order_seed)
    return {
        "image": rng.normal(size=(size, 4, 4, 1)).astype(np.float32),
        "label": rng.integers(0, 10, size).astype(np.int32),
        "mask": (np.arange(size) % 7 < np.arange(size) // 4).astype(np.float32),
    }


def noise():
    def train(order):
        for number in range(order.first_step, order.num_steps):
            yield examples(number, order.batch_size)

    def evaluate(order):
        yield examples(-1 % 97, order.batch_size)

    example = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in examples(0, 1).items()}
    return DataSet(
        name="noise",
        example=example,
        info={},
        prepare=lambda: None,
        train=train,
        evaluate=evaluate,
    )


def recipe_of(stem, *bindings):
    gin_config.load([f"strategies/{stem}.gin"], ["largest_dim.min_weight_size = 64", *bindings])
    return gin_state.value_of("train.strategy")


def perceptron(dropout_rate=0.3):
    return mlp(widths=(32, 16), num_classes=10, dropout_rate=dropout_rate)


def bench_of(stem, *, engine=None, spec=None, bindings=(), dtypes=(), **slots):
    single = recipe_of("single")
    slots = slots if engine is None else {**slots, "engine": engine}
    recipe = dataclasses.replace(recipe_of(stem, *bindings), **slots)
    settings = {
        "model": perceptron(),
        "optimizer": optax.adam(1e-2),
        "example": noise().example,
        "batch_size": BATCH,
        "seed": 3,
        **(spec or {}),
    }
    precision = max(float(jnp.finfo(x).eps) for x in ("float32", *dtypes))
    return Bench(recipe=recipe, against=single, spec=TrainSpec(**settings), precision=precision)


def found(stem, **options):
    dtypes = options.get("dtypes", ())
    done = certify(bench_of(stem, **options), noise(), steps=STEPS, dtypes=dtypes)
    assert not done.certified
    assert done.first is not None
    return f"{done.first} | {done.cause}"


def model_with(change, **options):
    return {"spec": {"model": bugs.with_loss(perceptron(**options), change)}}


TWO_AXES = "make_mesh.axes = {'data': 4, 'fsdp': 2}"  # replication is tracked over both
TWO = {"spec": {"accumulation_steps": 2}}
COARSE = {"bindings": ["average_gradients.dtype = 'bfloat16'"], "dtypes": ("bfloat16",)}
BUGS = {
    "summed": ("ddp", {"sync": bugs.summed}, "8 times .*: summed instead of averaged over all dev"),
    "averaged twice": ("ddp", {"sync": bugs.averaged_twice}, "0.125 times .*: averaged twice over"),
    "never synchronised": (
        "hsdp",
        {"sync": bugs.inside_groups_alone},
        r"gradient .* never synchronised over data$",
    ),
    "local norm": (
        "fsdp",
        {"reduction": bugs.local_norm, "spec": {"max_grad_norm": 0.1}},
        "clipped by another norm .* local norm",
    ),
    "stale gather of updated slices": (
        "zero1",
        {"update": bugs.stale_slices},
        r"parameter head/kernel on device \(data 0 fsdp 0\) are .* a stale gather",
    ),
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
    "dropout keys by device": ("ddp", model_with(bugs.keys_by_device), "only with random keys"),
    "mean of means under masks": (
        "ddp",
        model_with(bugs.mean_of_means, dropout_rate=0.0),
        "only with uneven mask",
    ),
    "double reduction": (
        "ddp",
        {"engine": bugs.checked_replication, "bindings": [TWO_AXES]},
        r"8 times .* under check_vma=True autodiff has summed",
    ),
    "cast on the wire": ("ddp", {"sync": bugs.cast_on_the_way}, "sends bfloat16, which nothing"),
    "rounded before": (
        "ddp",
        {"sync": bugs.rounded_before},
        r"step 0, gradient \w+.*\| gradients are .* as if .* rounded to bfloat16",
    ),
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
    "one gradient dropped": (
        "ddp",
        {"sync": bugs.one_dropped},
        r"gradient hidden_1/bias.*\| gradient hidden_1/bias is dropped",
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
    stem, options, told = BUGS[name]
    text = found(stem, **options)
    assert re.search(told, text), text


@pytest.mark.slow
def test_batch_statistics_of_each_device_are_found():
    model = convnet(features=(4,), hidden=8, num_classes=10, norm="batch")
    right = bench_of("ddp", spec={"model": model})
    done = certify(right, noise(), steps=STEPS)
    assert done.certified, done.as_json()["checks"]
    text = found("ddp", spec={"model": bugs.with_loss(model, bugs.own_statistics)})
    assert "statistics are each device's own" in text


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
    assert done.certified, (done.first, done.cause)
    checks = {check.what: check for check in done.checks}
    assert checks["saved and restored"].right
    assert len(done.steps) == STEPS
    # The bounds are near to what happens: what is a hundred times as far off would be found.
    gradients = [d for r in done.steps for d in r.differences if d.what == "gradient"]
    assert max(d.bound for d in gradients) < 200
    assert max(d.excess for d in gradients) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("stem", [s for s in stems() if s != "single"])
def test_every_shipped_strategy_is_certified(stem):
    model = mlp(api="nnx", widths=(32, 16), num_classes=10, dropout_rate=0.3)
    settings = {"model": model, "max_grad_norm": 0.1, "accumulation_steps": 2}
    done = certify(bench_of(stem, spec=settings), noise(), steps=STEPS)
    assert done.certified, (done.first, done.cause)


@pytest.mark.slow
def test_a_language_model_with_units_is_certified():
    def tokens(order):
        rng = np.random.default_rng(0)
        while True:
            yield {"tokens": rng.integers(0, 64, (order.batch_size, 12)).astype(np.int32)}

    def masked(order):
        yield {**next(tokens(order)), "mask": np.ones(order.batch_size, np.float32)}

    example = {"tokens": jax.ShapeDtypeStruct((12,), np.int32)}
    data = dataclasses.replace(noise(), example=example, train=tokens, evaluate=masked)
    model = transformer(vocab_size=64, width=16, depth=2, heads=2, mlp_width=32, tied=True)
    settings = {"model": model, "example": example, "batch_size": 16, "max_grad_norm": 1.0}
    done = certify(bench_of("fsdp", spec=settings), data, steps=STEPS)
    assert done.certified, (done.first, done.cause)


def test_the_costs_are_those_of_the_readmes_table():
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*?) \|[^|]*\|$", README, re.MULTILINE)
    told = {stem: sent for stem, sent in rows if not sent.endswith("(k = 1)")}
    told["hsdp"] = told["hsdp"].replace("`fsdp`'s", told["fsdp"])
    assert told == {stem: row.formula for stem, row in costs.TABLE.items()}


def test_ulps_are_of_the_greatest_element():
    a = np.asarray([1.0, 1e-9], np.float32)
    b = a + np.asarray([2**-22, 0], np.float32)
    found = differences.gap(b, a)
    assert (found.ulps, found.scale) == (2.0, 1.0)
    assert found.relative == pytest.approx(2**-22, rel=1e-3)
    assert differences.gap(a * np.nan, a).ulps == np.inf
    assert differences.gap(a * np.nan, a * np.nan).ulps == 0
    assert float(differences.ulp(3.0, np.float32)) == 2**-22
    assert float(differences.ulp(1.0, "bfloat16")) == 2**-7


def test_a_bound_follows_the_noise_and_has_a_floor():
    name = ("gradient", "w")
    right = np.ones(3, np.float32)
    envelope = differences.Envelope(float(np.finfo(np.float32).eps))

    def bound(ulps):
        noisy = {name: right + np.float32(ulps * 2**-23)}
        found, _ = envelope.compare(0, {name: right}, {name: right}, [noisy])
        return found.bound

    assert bound(0) == differences.FLOOR_ULPS
    assert bound(40) == differences.FACTOR * 40
    # A step without noise is judged by usual ones.
    assert bound(40) == bound(40) == bound(0) == differences.FACTOR * 40


def test_a_coarse_dtype_loosens_gradients_and_no_counts():
    right = {("gradient", "w"): np.ones(3, np.float32), ("items counted", ""): np.float32(128)}
    off = {name: x * np.float32(127 / 128) for name, x in right.items()}
    envelope = differences.Envelope(2.0**-7)
    wrong = [d.what for d in envelope.compare(0, off, right, [right]) if d.is_wrong]
    assert wrong == ["items counted"]


def test_an_update_is_held_to_each_element():
    name = ("parameter", "w")
    old = {name: np.asarray([1.0, 1e-6], np.float32)}
    right = {name: old[name] + np.float32(1e-9)}
    off = {name: right[name] + np.asarray([0, 1e-10], np.float32)}
    (same,) = differences.applied_alike(0, right, right, old, 1.0)
    (wrong,) = differences.applied_alike(0, off, right, old, 1.0)
    assert not same.is_wrong
    assert wrong.is_wrong, "an element far below the greatest one was off"


class TestCommand:
    """The command itself: exit status and what it prints."""

    @pytest.fixture
    def certify(self, command):
        def run(*flags, **options):
            return command(*flags, module="research_dp.certify", **options)

        return run

    def test_mistakes_are_told_in_a_line(self, certify, tmp_path):
        run = ["--gin_file=runs/digits.gin", "--cpu_devices=2"]
        done = certify(*run, f"--json={tmp_path / 'none' / 'c.json'}")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith("c.json cannot be written: No such file or directory.\n")
        done = certify(*run, "--workdir=w")
        assert done.returncode == 2 and "unrecognized arguments: --workdir=w" in done.stderr

    @pytest.mark.slow
    def test_an_oracle_that_there_is_not_is_told(self, certify):
        done = certify("--gin_file=runs/digits.gin", "--against=sinle", "--cpu_devices=2")
        assert done.returncode == 2
        assert "sinle.gin" in done.stderr and "Traceback" not in done.stderr

    @pytest.mark.slow
    def test_another_strategy_can_be_the_oracle(self, certify, tmp_path):
        file = tmp_path / "c.json"
        flags = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp_nnx.gin", "--cpu_devices=4"]
        done = certify(*flags, "--against=ddp", "--steps=4", f"--json={file}")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(file.read_text())
        assert found["certified"] and found["first_difference"] is None
        assert [step["step"] for step in found["steps"]] == [0, 1, 2, 3]
        gradient = found["steps"][0]["differences"]["gradient hidden_0/kernel"]
        assert gradient["ulps"] < gradient["bound_ulps"]  # on one machine both sum in one order
        assert "moved to ddp on data 4 x fsdp 1" in {check["what"] for check in found["checks"]}

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["bf16_gather", "bf16_params", "f16"])
    def test_named_dtypes_are_certified_within_their_own_rounding(self, certify, precision):
        flags = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin", "--cpu_devices=4"]
        done = certify(*flags, f"--gin_file=precision/{precision}.gin", "--steps=4")
        assert done.returncode == 0, done.stdout + done.stderr


PAGE = ROOT / "docs" / "certify.md"
OUTPUT = re.compile(r"```console\n\$ python -m (\S+) (.*)\n((?:.*\n)*?)```\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_the_page_shows_what_the_command_prints(number, command, tmp_path):
    text = PAGE.read_text()
    for name, source in re.findall(r"`(my_pkg/[\w.]+)`\n\n```\w*\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    (tmp_path / "my_pkg" / "__init__.py").touch()
    found = list(OUTPUT.finditer(text))[number]
    paths = {"cwd": tmp_path, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = command(*shlex.split(found[2]), module=found[1], **paths)
    assert done.returncode == number, done.stderr
    shown = done.stdout[done.stdout.index("Steps from") :]  # not that the data was prepared
    real = "".join(f"{line.rstrip()}\n" for line in shown.splitlines())
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(text[: found.start(3)] + real + text[found.end(3) :])
    else:
        assert verdicts(found[3]) == verdicts(real)


def verdicts(output):
    """What does not differ between machines: checks, whether they hold, and the last lines."""
    checks = re.findall(r"^  (\w[\w ,]*?) +(holds|FAILS|-)  ", output, re.MULTILINE)
    ends = [line for line in output.splitlines() if re.match("(NOT )?CERT|Cause", line)]
    return checks, ends


@pytest.mark.slow
def test_a_run_that_is_not_finite_is_not_certified():
    done = certify(bench_of("fsdp", spec={"optimizer": optax.sgd(1e30)}), noise(), steps=STEPS)
    assert not done.certified
    assert "the oracle's loss is nan at step" in str(done.first)
