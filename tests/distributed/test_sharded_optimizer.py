"""Every optimizer of optax on slices: the numbers of one device, or refused with the reason."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P

from research_dp import OptaxAdapter, UsageError, fsdp_update, slice_specs, slice_state
from tests.support.steps import mesh_of, on

# Of noisy_sgd, which is made without a key here.
pytestmark = pytest.mark.filterwarnings("ignore:Specifying a key")
SHAPES = {"w": (6, 5), "b": (5,), "one": ()}
REFUSED = {
    "adafactor": "reduce_sum",
    "lamb": "reduce_sum",
    "novograd": "reduce_sum",
    "noisy_sgd": "random_split",
    "contrib.galore": "state goes by a parameter's shape",
    "contrib.muon": "mixes elements",
    "contrib.prodigy": "dot_general",
    "sm3": "state goes by a parameter's shape",
    "lbfgs": "state goes by a parameter's shape",
    "polyak_sgd": "nothing else: TypeError: .* 'value'",
    "contrib.reduce_on_plateau": "nothing else: TypeError: .* 'value'",
    "contrib.momo": "nothing else: TypeError: .* 'value'",
    "contrib.sophia": "nothing else: ValueError: obj_fn",
}
ACCEPTED = {"adamw", "lion", "sgd", "rmsprop", "contrib.schedule_free_adamw"}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def made_by(function):
    """What a function of optax makes of a rate, or of nothing, if it is a transform."""
    for arguments in ((1e-2,), ()):
        try:
            made = function(*arguments)
            jax.eval_shape(made.init, arrays(0))
        except Exception:  # another kind of function: whatever it raises
            continue
        if hasattr(made, "update"):
            return made
    return None


def all_of_optax():
    found = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        functions = inspect.getmembers(module, inspect.isfunction)
        made = {prefix + name: made_by(f) for name, f in functions if not name.startswith("_")}
        found |= {name: transform for name, transform in made.items() if transform is not None}
    return found


@pytest.fixture(scope="module")
def sorted_out():
    """(accepted, why the others are not) of all transforms; another error fails the tests."""
    accepted, refused = {}, {}
    for name, transform in all_of_optax().items():
        try:
            OptaxAdapter(transform).check_slices(arrays(0), 4)
            accepted[name] = transform
        except UsageError as error:
            refused[name] = str(error)
    return accepted, refused


def test_each_is_accepted_or_refused_with_the_reason(sorted_out):
    accepted, refused = sorted_out
    assert not ACCEPTED - accepted.keys()
    assert len(accepted) > 40
    assert not REFUSED.keys() - refused.keys()
    for name, words in REFUSED.items():
        assert re.search(words, refused[name]), (name, refused[name])
    assert all(message.count("\n") == 0 for message in refused.values())


def compare(accepted):
    # Its root of a difference of moments is ill-conditioned: slices of 1e-3 off are rounding.
    accepted = {n: t for n, t in accepted.items() if n != "scale_by_stddev"}
    params = {name: arrays(0) for name in accepted}
    state = {n: t.init(params[n]) for n, t in accepted.items()}
    sliced = {n: slice_state(t, state[n], params[n], 4) for n, t in accepted.items()}
    specs = {n: slice_specs(t, params[n], "r", 4) for n, t in accepted.items()}

    @jax.jit
    def unsharded(params, state, gradients):
        both = {n: t.update(gradients, state[n], params[n]) for n, t in accepted.items()}
        new = {n: optax.apply_updates(params[n], updates) for n, (updates, _) in both.items()}
        return new, {n: state for n, (_, state) in both.items()}

    def on_slices(params, state, gradients):
        both = {n: fsdp_update(gradients, params[n], t, state[n]) for n, t in accepted.items()}
        return {n: new for n, (new, _) in both.items()}, {n: s for n, (_, s) in both.items()}

    step = on(mesh_of(r=4), on_slices, (P(), specs, P()), (P(), specs))
    own = params
    for seed in (1, 2):
        params, state = unsharded(params, state, arrays(seed))
        own, sliced = step(own, sliced, arrays(seed))
    for name in accepted:
        for path, p in params[name].items():
            np.testing.assert_allclose(own[name][path], p, 1e-4, 1e-6, err_msg=f"{name} {path}")


@pytest.mark.slow
def test_accepted_ones_give_the_numbers_of_one_device(sorted_out):
    compare(sorted_out[0])


def test_common_ones_give_the_numbers_of_one_device(sorted_out):
    compare({name: sorted_out[0][name] for name in ACCEPTED})
