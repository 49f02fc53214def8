"""Every public function answers a wrong argument with an error that names it."""

import inspect
import re

import jax
import pytest

import research_dp
from research_dp import UsageError
from tests.support.calls import CALLS, RECORDS, SPEC, TAKES, USUAL, WRONG, recipe

# Called where axes are bound.
MAPPED = {
    *("DataParallel.all_reduce_gradients", "DataParallel.all_reduce_gradients_static"),
    *("accumulate_gradients", "all_mean", "all_mean_tree", "apply_gradients"),
    *("clip_by_global_norm_sharded", "fsdp_apply_gradients", "fsdp_update", "gather_params"),
    *("gather_array_with_mean_grads", "gather_tree", "global_norm"),
    *("reduce_gradients_across_devices", "scatter_gradients", "scatter_mean"),
    *("scatter_mean_tree", "shard_params", "sharded_global_norm", "sync_gradients"),
    *("weighted_loss", "weighted_mean"),
}
COMMANDS = {"run", "plan", "certify", "compare", "dry_run", "evaluate", "load", "load_hf", "export"}
INSTANCES = {
    "DataParallel": research_dp.DataParallel,
    "DeviceMeshManager": research_dp.DeviceMeshManager,
    "OptaxAdapter": lambda: research_dp.OptaxAdapter(SPEC["optimizer"]),
}


def targets():
    """(name, function) of all that can be called: functions, classes, methods of instances."""
    for name in research_dp.__all__:
        value = getattr(research_dp, name)
        if name in RECORDS:
            continue
        yield name, value
        if name in INSTANCES:
            for method in vars(value):
                bound = None if method.startswith("_") else getattr(INSTANCES[name](), method)
                if inspect.isroutine(bound):
                    yield f"{name}.{method}", bound


TARGETS = dict(targets())


def parameters(name):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(TARGETS[name]).parameters.values()
    return [p.name for p in found if p.kind not in kinds]


def entry(name, parameter):
    """(a right argument, its kind) of a parameter; KeyError: the table lacks it."""
    return CALLS[name][parameter] if parameter in CALLS[name] else USUAL[parameter]


def call(name, /, **changed):
    """Calls a function with right arguments, but for those that are given."""
    arguments = {p: entry(name, p)[0] for p in parameters(name)} | changed
    if name == "TrainSpec":
        return recipe().build(research_dp.TrainSpec(**arguments))
    if name not in MAPPED:
        return TARGETS[name](**arguments)

    def mapped():
        TARGETS[name](**arguments)
        return 0

    return jax.make_jaxpr(mapped, axis_env=[("data", 2), ("fsdp", 4)])()


def outcome(name, parameter, value):
    """None: the call returned; otherwise what it raised, and whether that is an answer."""
    try:
        call(name, **{parameter: value})
    except UsageError as error:
        return str(error), name in {*COMMANDS, "strategy"} or named(parameter, str(error), value)
    except NameError as error:  # an axis that is not bound
        return str(error), "unbound axis name" in str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    return None


def named(parameter, message, value):
    """Whether a message names a parameter, or a leaf of it."""
    if any(word in message for word in (repr(value), *LEAVES)):
        return True
    return bool(re.search(rf"\b({parameter}|{parameter.removesuffix('_name')})\b", message))


LEAVES = ("'w'", "'other'", "'bias'", "'x'", "of shape")


def test_every_public_name_is_in_the_table_and_every_right_call_is_right():
    assert set(TARGETS) == set(CALLS)
    assert not RECORDS - set(research_dp.__all__)
    for name in TARGETS:
        assert not set(CALLS[name]) - set(parameters(name)), name
        assert all(entry(name, parameter) for parameter in parameters(name))


@pytest.fixture(autouse=True, scope="module")
def plain_tracebacks():
    """Thousands of errors are raised here, and filtering a traceback takes longer than most."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("name", TARGETS)
def test_a_right_call_returns(name):
    if name not in COMMANDS:  # they have tests of their own
        call(name)


@pytest.mark.parametrize("name", TARGETS)
def test_a_wrong_argument_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a wrong argument may be a right name of a file
    wrong = []
    for parameter in parameters(name):
        kind = entry(name, parameter)[1]
        takes = {*TAKES[kind.removesuffix("?")], *(["None"] if kind.endswith("?") else [])}
        for what in WRONG:
            if kind.startswith("a function") and what in takes:
                continue  # what it does with its arguments is its own affair
            got = outcome(name, parameter, WRONG[what])
            if (got is None and what not in takes) or (got is not None and not got[1]):
                wrong.append(f"{parameter} = {what}: {got[0] if got else 'accepted'}"[:300])
    assert not wrong, "\n" + "\n".join(wrong)
