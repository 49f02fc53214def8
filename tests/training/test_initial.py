"""`train.initial`: another run, safetensors or Orbax give parameters, bit for bit, or an error."""

import dataclasses
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import research_dp
from research_dp.commands.saved_run import check_same_model
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError
from research_dp.runs.checkpoint import read_saved
from research_dp.strategies import TrainSpec
from research_dp.strategies.strategy import init_key
from research_dp.training.initial import InitialParams, _lost
from research_dp.training.train import train
from research_dp.types import DataSet
from tests.support.recipes import recipe

SIZE, FEATURES = 16, 8


class Net(nn.Module):
    classes: int = 10
    head: str = "head"

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(32, name="body")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="norm")(x))
        return nn.Dense(self.classes, name=self.head)(x)


def model(**options):
    loss = optax.softmax_cross_entropy_with_integer_labels
    return research_dp.from_linen(Net(**options), loss=loss)


def batch(seed, size):
    drawn = np.random.default_rng(seed)
    x = drawn.normal(size=(size, FEATURES)).astype(np.float32)
    return {"x": x, "y": drawn.integers(3, size=size).astype(np.int32)}


def batches(order):
    for step in range(order.first_step, order.num_steps):
        whole = batch([order.seed, step], order.batch_size)
        yield {name: x[order.rows] for name, x in whole.items()}


def evaluation(order):
    whole = {**batch(9, order.batch_size), "mask": np.ones(order.batch_size, np.float32)}
    yield {name: x[order.rows] for name, x in whole.items()}


EXAMPLE = {
    "x": jax.ShapeDtypeStruct((FEATURES,), np.float32),
    "y": jax.ShapeDtypeStruct((), np.int32),
}
DATA = DataSet(
    name="tiny",
    example=EXAMPLE,
    info={},
    prepare=lambda: None,
    train=batches,
    evaluate=evaluation,
)


def under(stem):
    return recipe(stem, *["shard_params.min_weight_size = 8"] * ("fsdp" in stem))


def run(folder, stem, *, optimizer=None, num_steps=2, **options):
    """Trains, and returns what is in its last checkpoint, by name."""
    settings = {"model": model(), "data": DATA, "strategy": under(stem), **options}
    status = train(
        optimizer=optimizer or optax.adam(1e-2),
        num_steps=num_steps,
        batch_size=SIZE,
        workdir=str(folder),
        **settings,
    )
    assert status == 0
    saved = read_saved(folder)
    return by_path({"params": saved.params, "model_state": saved.model_state})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "run"
    return folder, run(folder, "zero1")


def built(stem, optimizer=None, **options):
    optimizer = optimizer or optax.adam(1e-2)
    spec = TrainSpec(model=model(**options), optimizer=optimizer, example=EXAMPLE, batch_size=SIZE)
    return under(stem).build(spec)


def begun(strategy, path, **options):
    """The state at step 0 by name, and what was said."""
    said = []
    arrays = InitialParams(str(path), **options).arrays(strategy, said.append)
    state = strategy.init(init_key(5), arrays)
    for x, like in zip(
        jax.tree.leaves(state), jax.tree.leaves(strategy.abstract_state), strict=True
    ):
        assert x.dtype == like.dtype and x.sharding == like.sharding
    cut = strategy.logical(state)
    return state, by_path({"params": cut.params, "model_state": cut.model_state}), said


def assert_same_bits(found, expected, but=()):
    assert found.keys() == expected.keys()
    for path in found.keys() - set(but):
        a, b = np.asarray(found[path]), np.asarray(expected[path])
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), path


HEAD = ["params/head/bias", "params/head/kernel"]


@pytest.mark.parametrize("stem", ["fsdp", "ddp", "spmd_fsdp"])
def test_another_head_on_the_body_of_a_run_of_another_strategy(stem, base, tmp_path):
    folder, trained = base
    new = {"model": model(classes=3), "optimizer": optax.sgd(0.0), "num_steps": 1, "seed": 5}
    initial = InitialParams(str(folder), skip=["head/.*", "model_state/.*"])
    found = run(tmp_path / "tuned", stem, initial=initial, **new)
    fresh = run(tmp_path / "fresh", stem, **new)
    body = [path for path in trained if path.startswith("params/") and path not in HEAD]
    assert len(body) == 4
    for path in body:  # a learning rate of 0: these are the parameters of step 0
        assert found[path].tobytes() == trained[path].tobytes() != fresh[path].tobytes(), path
    for path in HEAD:
        assert found[path].shape[-1] == 3
        np.testing.assert_array_equal(found[path], fresh[path])
    assert json.loads((tmp_path / "tuned" / "summary.json").read_text())["step"] == 1


@pytest.mark.parametrize("stem", ["fsdp", "ddp", "spmd_fsdp"])
@pytest.mark.parametrize("kind", ["run", "checkpoint", "safetensors", "orbax", "params"])
def test_every_kind_of_source_gives_its_bits_onto_the_shards(kind, stem, base, tmp_path):
    folder, trained = base
    path = {"run": folder, "checkpoint": folder / "checkpoints" / "2"}.get(kind)
    if path is None:
        path = tmp_path / {"safetensors": "a.safetensors"}.get(kind, "a")
    if kind in ("safetensors", "orbax"):
        research_dp.export(folder, path)
    if kind == "params":  # a bare tree of parameters, without model state
        with ocp.StandardCheckpointer() as saver:
            saver.save(path, read_saved(folder).params)
    strategy = built(stem)
    state, found, said = begun(strategy, path)
    fresh = [name for name in trained if name.startswith("model_state/")] * (kind == "params")
    assert_same_bits(found, trained, but=fresh)
    assert state.step == 0 and all((x == 0).all() for x in jax.tree.leaves(state.opt_state))
    assert re.fullmatch(r"Initial parameters: \d arrays of [^;]*", said[0]), said


def test_a_frozen_body_keeps_its_bits_in_checkpoints_that_any_run_continues(base, tmp_path):
    folder, trained = base
    frozen = {"frozen": ["body/.*", "norm/.*"], "model": model(classes=3)}
    initial = InitialParams(str(folder), skip=["head/.*", "model_state/.*"])
    first = run(tmp_path / "tuned", "fsdp", initial=initial, **frozen)
    found = run(tmp_path / "tuned", "ddp", num_steps=4, **frozen)
    assert found.keys() == trained.keys()
    for path in [path for path in trained if path.startswith("params/")]:
        source = first if path in HEAD else trained
        assert (found[path].tobytes() == source[path].tobytes()) is (path not in HEAD), path
    with pytest.raises(UsageError, match=r"model, optimizer or train\.frozen: .*norm/bias"):
        run(tmp_path / "tuned", "ddp", num_steps=5, **{**frozen, "frozen": "body/.*"})

    strategy = built("fsdp", classes=3)
    _, begun_with, said = begun(strategy, tmp_path / "tuned")
    assert_same_bits(begun_with, found)
    assert "nobody takes" not in said[0]
    some = under("fsdp").build(dataclasses.replace(strategy.spec, frozen="norm/.*"))
    check_same_model(read_saved(tmp_path / "tuned"), some)
    _, begun_with, _ = begun(some, tmp_path / "tuned")
    frozen_name = "model_state/frozen_params/norm/scale"
    np.testing.assert_array_equal(begun_with[frozen_name], found["params/norm/scale"])


def test_names_change_by_patterns_and_dtypes_to_the_models(base, tmp_path):
    arrays = {
        name.removeprefix("params/").replace("/", ".").replace("head", "classifier"): x
        for name, x in base[1].items()
        if name.startswith("params/")
    }
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}
    file = tmp_path / "other.safetensors"
    save_file({**rounded, "mask": np.ones(3, np.float32)}, file)
    rename = {r"\.": "/", "^classifier/": "head/"}
    _, found, said = begun(built("fsdp"), file, rename=rename)
    expected = {name: x.astype(ml_dtypes.bfloat16).astype(x.dtype) for name, x in base[1].items()}
    assert_same_bits(found, expected, but=[n for n in found if n.startswith("model_state/")])
    assert said[0].endswith("; nobody takes mask")


def test_an_optimizer_begins_with_the_parameters_that_are_read(base):
    """Some keep a copy of parameters in their state."""
    averages = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params: (updates, state)
    )
    state, found, _ = begun(built("ddp", optax.chain(averages, optax.sgd(0.1))), base[0])
    kept = by_path({"params": state.opt_state[0]})
    assert_same_bits(kept, {name: x for name, x in found.items() if name.startswith("params/")})


REFUSED = {
    "another head": (
        {"classes": 3},
        {},
        r"path = .* does not fit the model: head/bias is \(3,\) here and \(10,\) there, "
        r"head/kernel is \(32, 3\) here and \(32, 10\) there.\n  Let initial_params.skip",
    ),
    "another name": ({"head": "top"}, {}, r"model: top/bias \(10,\) is not in it, top/kernel"),
    "two of a name": ({}, {"rename": {"kernel": "bias"}}, "params/body/bias, params/body/kern"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_both_shapes(case, base):
    changes, options, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        begun(built("ddp", **changes), base[0], **options)


def test_what_cannot_be_read_is_refused(base, tmp_path):
    empty, text, broken = tmp_path / "empty", tmp_path / "a.safetensors", tmp_path / "broken"
    empty.mkdir()
    text.write_text("nothing")
    (broken / "checkpoints").mkdir(parents=True)
    strategy = built("ddp")
    for path in (tmp_path / "none", empty, text):
        with pytest.raises(
            UsageError, match=r"initial_params.path = .* cannot be read: .*Give the"
        ):
            begun(strategy, path)
    with pytest.raises(UsageError, match="has no checkpoint: give the folder of a run"):
        begun(strategy, broken)
    with pytest.raises(UsageError, match=r"initial_params.skip: '\(' is no regular expression"):
        InitialParams("a", skip=["("])


def parameters(base):
    """A run's parameters by name, without the model state."""
    return {k: np.array(x) for k, x in base[1].items() if k.startswith("params/")}


def written(path, arrays, like=str):
    """A file of arrays; `like` gives other names of dtypes to what is in it."""
    save_file(arrays, path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    head = json.dumps(json.loads(like(path.read_bytes()[8 : 8 + size].decode()))).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + path.read_bytes()[8 + size :])
    return path


KERNEL = "params/head/kernel"
LOST = {
    "NaN": ((np.float32, np.nan), {}, r": 1 of 320 in head/kernel \(float32\)"),
    "infinite": ((np.float32, -np.inf), {}, r": 1 of 320 in head/kernel \(float32\)"),
    "too large": ((np.float64, 1e300), {}, r": 1 of 320 in head/kernel \(float32\)"),
    "too large for its dtype": (
        (np.float32, 1e6),
        {"param_dtype": "float16"},
        "1 of 320 in head/kernel ",
    ),
    "complex": ((np.complex64, 1j), {}, r": 320 of 320 in head/kernel \(complex64\)"),
    "complex without a part": ((np.complex64, 1), {}, r": 320 of 320 in head/kernel \(complex64\)"),
}


@pytest.mark.parametrize("stem", ["fsdp", "ddp"])
@pytest.mark.parametrize("case", LOST)
def test_a_value_that_the_model_would_not_have_is_refused_by_name(case, stem, base, tmp_path):
    (dtype, value), options, message = LOST[case]
    arrays = parameters(base)
    arrays[KERNEL] = arrays[KERNEL].astype(dtype)
    arrays[KERNEL][3, 4] = value
    lines = [f"data_parallel.param_dtype = '{x}'" for x in options.values()]
    spec = TrainSpec(model=model(), optimizer=optax.sgd(0.1), example=EXAMPLE, batch_size=SIZE)
    strategy = recipe(stem, *["shard_params.min_weight_size = 8"] * (stem == "fsdp"), *lines)
    strategy = strategy.build(spec)
    save_file(arrays, tmp_path / "a.safetensors")
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "a", {name: x for name, x in arrays.items()})
    for path in (tmp_path / "a.safetensors", tmp_path / "a"):
        with pytest.raises(UsageError, match=message) as refused:
            begun(strategy, path)
        assert refused.value.binding == "initial_params.path"
        begun(strategy, path, skip=["head/kernel"])


def test_integers_are_numbers_but_fractions_no_integers():
    for x, dtype, lost in (
        (np.int32([1, 2]), np.float32, 0),
        (np.bool_([1, 0]), np.float32, 0),
        (np.float32([2, -1]), np.int32, 0),
        (np.float32([1.5, np.nan, 3e9]), np.int32, 3),
        (np.int32([-1, 300]), np.uint8, 2),
        (np.float32([1e30, 70000, 1]), np.float16, 2),
        (np.float32([1e30]), ml_dtypes.bfloat16, 0),
    ):
        assert int(_lost(jnp.asarray(x), np.dtype(dtype)).sum()) == lost, (x, dtype)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_a_dtype_that_cannot_be_read_is_named_where_it_is_needed(dtype, base, tmp_path):
    arrays = {**parameters(base), "params/head/bias": np.zeros(10, np.uint8)}
    path = written(tmp_path / "a.safetensors", arrays, lambda head: head.replace("U8", dtype))
    with pytest.raises(UsageError, match=f"cannot be read: params/head/bias is {dtype}, which"):
        begun(built("ddp"), path)
    begun(built("ddp"), path, skip=["head/bias"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rename": {"hidden": r"\3"}},
            r"rename: 'hidden' .* '\\\\3' .*: invalid group refer",
        ),
        ({"rename": {"(?i)hidden": r"\g<a>"}}, "rename: .*unknown group name 'a'"),
        ({"rename": {"hidden": "\\q"}}, r"rename: .*bad escape \\q"),
        ({"rename": {"(": "a"}}, r"rename: '\(' is no regular expression"),
        ({"skip": ["hed/.*"]}, r"initial_params.skip = \['hed/.\*'\]: .* matches none of the"),
        ({"skip": ["head/.*", "top"]}, "the regular expression 'top' matches none of the"),
        ({"skip": [".*"]}, "they match all of the parameters: body/bias, "),
        ({"path": ""}, "initial_params.path = '' cannot be read: there is no such"),
    ],
)
def test_patterns_and_paths_without_a_meaning_are_refused(options, message, base):
    with pytest.raises(UsageError, match=message) as refused:
        begun(built("ddp"), **{"path": base[0], **options})
    assert refused.value.binding == f"initial_params.{next(iter(options))}"


def test_names_of_a_file_are_shown_in_one_line_without_what_a_terminal_acts_on(base, tmp_path):
    arrays = parameters(base)
    hostile = {f"a{i}\x1b[31m\n\u202e{'x' * 100_000}": np.zeros(2, np.float32) for i in range(3)}
    save_file({**arrays, **hostile}, tmp_path / "a.safetensors")
    _, _, said = begun(built("ddp"), tmp_path / "a.safetensors")
    save_file(hostile, tmp_path / "b.safetensors")
    with pytest.raises(UsageError) as refused:
        begun(built("ddp"), tmp_path / "b.safetensors")
    with pytest.raises(UsageError) as merged:
        begun(built("ddp"), tmp_path / "b.safetensors", rename={"(?s).*": "a\x1b"})
    for text in (*said, str(refused.value), str(merged.value)):
        assert len(text) < 1600 and r"a0\x1b[31m\n\u202exxx" in text
        assert all(c.isprintable() for c in text.replace("\n  Let initial_params", ""))


def test_a_resumed_run_reads_its_own_checkpoint(base, tmp_path, capsys):
    source = tmp_path / "a.safetensors"
    research_dp.export(base[0], source)
    run(tmp_path / "run", "ddp", initial=InitialParams(str(source)))
    assert "Initial parameters: 8 arrays of" in capsys.readouterr().out
    source.unlink()
    run(tmp_path / "run", "ddp", num_steps=3, initial=InitialParams(str(source)))
    said = capsys.readouterr().out
    assert "Initial parameters" not in said and "Continuing from step 2" in said
