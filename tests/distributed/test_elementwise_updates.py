"""What a map that splits an update finds of optimizers that mix the elements of an array."""

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import research_dp as rdp
from research_dp import UsageError, fsdp_apply_gradients
from tests.support.steps import mesh_of, on

SHAPE = (4, 6)
KEY = np.array([0, 7], np.uint32)
DECAYS = np.array([0.1, 0.9, 0.3], np.float32)


def decay(carry, d):
    return carry * d + d, None


def noise(shape):
    return jax.random.normal(jax.random.wrap_key_data(KEY), shape)


ELEMENTWISE = {
    "arithmetic": lambda g, p: g * 0.9 + jnp.square(p) / 3.0,
    "where": lambda g, p: jnp.where(g > 0, jax.nn.softplus(p), jnp.nan_to_num(g)),
    "where a scalar": lambda g, p: jnp.where(jnp.float32(1) > 0, g, p),
    "reduce_precision": lambda g, p: lax.reduce_precision(g, 5, 3) + p,
    "casts": lambda g, p: g.astype(jnp.bfloat16).astype(jnp.float32) + jnp.full(p.shape, 2.0),
    "ravel": lambda g, p: (jnp.ravel(g) * 2 + jnp.ravel(p)).reshape(p.shape),
    "cond": lambda g, p: lax.cond(jnp.float32(1) > 0, lambda x: x + 1, lambda x: x * p, g),
    "loop": lambda g, p: lax.fori_loop(0, 3, lambda i, x: x * p + i, g),
    "remat": lambda g, p: jax.checkpoint(jnp.sin)(g) + p,
    "complex": lambda g, p: jnp.abs(g + 1j * p),
}
MIXING = {
    "reverse": lambda g, p: g[..., ::-1],
    "roll": lambda g, p: jnp.roll(g, 1),
    "mean of a dim": lambda g, p: g - g.mean(0, keepdims=True),
    "size": lambda g, p: g / g.size,
    "a branch on the shape": lambda g, p: g * (2.0 if g.shape[0] > 1 else 1.0),
    "transpose": lambda g, p: g.reshape(g.shape[::-1]).T.reshape(g.shape),
    "place": lambda g, p: g * jnp.arange(float(g.shape[0] * 6)).reshape(g.shape),
    "noise for each element": lambda g, p: g + noise(g.shape),
    "cond on all": lambda g, p: lax.cond(jnp.all(g < 9), lambda x: x + 1, lambda x: x, g),
    "while of all": lambda g, p: lax.while_loop(lambda x: jnp.sum(x) < 50, lambda x: x + 1, g),
    "cumsum": lambda g, p: jnp.cumsum(g.ravel()).reshape(g.shape),
    "sort": lambda g, p: jnp.sort(g.ravel()).reshape(g.shape),
    "take": lambda g, p: jnp.take(g, jnp.arange(6)[::-1], 1),
    "count": lambda g, p: g / jnp.sum(jnp.ones_like(g)),
    "scan over rows": lambda g, p: lax.scan(lambda c, x: (c + x, c), jnp.zeros(6), g)[1],
    "pad": lambda g, p: jnp.pad(g, ((0, 0), (1, 0)))[:, :-1],
    "order of a scan": lambda g, p: lax.scan(decay, g, DECAYS, reverse=g.shape[0] > 1)[0] + p,
    "dtype of a number": lambda g, p: (
        g * (jnp.ones((), jnp.bfloat16 if g.shape[0] > 1 else jnp.float16) / 3).astype(g.dtype)
    ),
    "length of a loop": lambda g, p: lax.fori_loop(0, g.shape[0], lambda i, x: x * p, g),
    "power": lambda g, p: lax.integer_pow(g, g.shape[0]),
    "another order": lambda g, p: g.ravel(order="F").reshape(g.shape),
    "callback": lambda g, p: jax.pure_callback(lambda x: x[:, ::-1], g, g),
}


def check(function):
    """A function of a gradient and its parameter, as an update of slices for four devices."""
    update = optax.stateless(lambda g, p: jax.tree.map(function, g, p))
    rdp.OptaxAdapter(update).check_slices({"w": jnp.ones(SHAPE)}, 4)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_are_accepted(name):
    check(ELEMENTWISE[name])


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_elements_or_go_by_the_shape_are_refused(name):
    with pytest.raises(UsageError, match=r"mixes elements of a parameter \(.*one of 4 slices"):
        check(MIXING[name])


def test_a_number_that_one_device_has_is_not_for_others():
    """A parameter of one element is on the first device, and zero elsewhere."""

    def update(grads, state, params):
        return {"w": grads["w"] * (1 + params["s"]), "s": grads["s"]}, state

    params = {"w": jnp.ones(8), "s": jnp.ones(())}
    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(UsageError, match=r"\(mul with a parameter that is one number\)"):
        rdp.OptaxAdapter(optimizer).check_slices(params, 4)


def test_state_that_has_a_parameters_name_is_not_the_parameters():
    params = {"learning_rate": jnp.ones(()), "w": jnp.ones((8, 4))}
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    state = rdp.slice_state(optimizer, optimizer.init(params), params, 4)
    assert state.hyperparams["learning_rate"].shape == ()


# ---- Objects with `apply_gradients` of anyone's own ----


class Own:
    """Any Optax transform as a class that keeps state as it likes."""

    def __init__(self, transform):
        self.transform, self.kept, self.steps = transform, {}, 0

    def apply_gradients(self, gradients, parameters):
        state = self.kept.get("state") or self.transform.init(parameters)
        updates, self.kept["state"] = self.transform.update(gradients, state, parameters)
        self.steps += 1
        return optax.apply_updates(parameters, updates)


class NormOfTheStepBefore:
    """Elementwise in this step; what it keeps for the next one is not."""

    norm = 1.0

    def apply_gradients(self, gradients, parameters):
        new = jax.tree.map(lambda p, g: p - 0.1 * g / self.norm, parameters, gradients)
        self.norm = optax.tree.norm(gradients)
        return new


class Locked(Own):
    def __init__(self, transform):
        super().__init__(transform)
        self.lock = threading.Lock()  # copy.deepcopy refuses it


PARAMS = {"w": jnp.asarray(np.random.default_rng(1).normal(size=SHAPE), jnp.float32)}


def with_state(transform, params=PARAMS):
    """An object of an own class that was given its state as slices for four devices."""
    made = Own(transform)
    slices = {k: (*(1,) * (p.ndim - 1), -(-p.size // 4)) for k, p in params.items()}
    made.kept["state"] = transform.init({k: jnp.zeros(shape) for k, shape in slices.items()})
    return made


def steps(make, count=2, params=PARAMS):
    """Parameters after some steps within one map, on four devices."""

    def run(params):
        optimizer = make()
        for _ in range(count):
            gradients = jax.tree.map(jnp.sin, params)
            params = fsdp_apply_gradients(gradients, params, optimizer)
        return params

    return on(mesh_of(r=4), run)(params)


@pytest.mark.parametrize(
    "transform",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
        optax.lamb(0.1),
        optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.roll(x, 1), g)),
    ],
)
def test_own_classes_that_mix_elements_are_refused(transform):
    with pytest.raises(UsageError, match=r"mixes elements of a parameter .* one of 4 slices"):
        steps(lambda: Own(transform))


def test_arrays_in_own_classes_do_not_hide_what_mixes():
    change = optax.stateless(lambda g, _: jax.tree.map(lambda x: x + noise(x.shape), g))

    def with_others():
        made = Own(change)
        made.rates, made.key = jnp.linspace(1, 0, 10), jnp.asarray(KEY)
        return made

    for make in (lambda: with_state(optax.chain(optax.trace(0.9), change)), with_others):
        with pytest.raises(UsageError, match="mixes elements of a parameter"):
            steps(make)


def test_own_classes_must_not_mix_elements_of_their_state():
    def stacked_by_a_scan(m):
        return lax.scan(lambda carry, _: (carry, m), 0.0, None, length=2)[1].sum()

    for total in (jnp.sum, stacked_by_a_scan):

        def update(updates, state, params, total=total):
            return jax.tree.map(lambda g, m: g * (1 + total(m)), updates, state), state

        transform = optax.GradientTransformation(lambda params: params, update)
        with pytest.raises(UsageError, match="mixes elements of a parameter"):
            steps(lambda t=transform: with_state(t))


@pytest.mark.parametrize("given", [Own, with_state])
def test_own_classes_that_are_elementwise_are_right_and_keep_their_state(given):
    transform, made = optax.adam(0.1), []
    # Slices of both have the same shape: the paths in the state say which is which.
    params = {**PARAMS, "v": PARAMS["w"].reshape(3, 8)}

    def make():
        made.append(given(transform) if given is Own else given(transform, params))
        return made[-1]

    out = steps(make, params=params)
    assert made[0].steps == 2, "the check changed the object"
    state = transform.init(params)
    for _ in range(2):
        updates, state = transform.update(jax.tree.map(jnp.sin, params), state, params)
        params = optax.apply_updates(params, updates)
    for name, p in params.items():
        np.testing.assert_allclose(out[name], p, rtol=1e-5)


def test_own_classes_may_have_meshes_and_devices():
    def make():
        made = Own(optax.sgd(0.1))
        made.mesh, made.devices = mesh_of(r=4), jax.devices()
        made.sharding = jax.sharding.NamedSharding(made.mesh, jax.sharding.PartitionSpec("r"))
        return made

    out = steps(make, 1)
    np.testing.assert_allclose(out["w"], PARAMS["w"] - 0.1 * np.sin(PARAMS["w"]), rtol=1e-5)


def test_apply_gradients_may_be_an_attribute_of_an_object():
    def sgd(gradients, parameters):
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)

    out = steps(lambda: types.SimpleNamespace(apply_gradients=sgd), 1)
    np.testing.assert_allclose(out["w"], PARAMS["w"] - 0.1 * np.sin(PARAMS["w"]), rtol=1e-5)
    lamb = rdp.OptaxAdapter(optax.lamb(0.1))
    with pytest.raises(UsageError, match="mixes elements of a parameter"):
        steps(lambda: types.SimpleNamespace(apply_gradients=lamb.apply_gradients))


def test_what_own_classes_keep_between_steps_must_not_mix_either():
    with pytest.raises(UsageError, match=r"mixes elements of a parameter \(reduce_sum\)"):
        steps(NormOfTheStepBefore)


def test_a_class_that_cannot_be_traced_in_a_copy_says_itself_that_it_is_elementwise():
    with pytest.raises(UsageError, match=r"Locked, could not be checked .*elementwise = True"):
        steps(lambda: Locked(optax.sgd(0.1)))

    class Unreadable(Own):
        def __getstate__(self):
            raise RuntimeError("not to be saved")

    with pytest.raises(UsageError, match=r"Unreadable, could not be checked .*not to be saved"):
        steps(lambda: Unreadable(optax.sgd(0.1)))

    class Declared(Locked):
        elementwise = True

    out = steps(lambda: Declared(optax.sgd(0.1)), 1)
    np.testing.assert_allclose(out["w"], PARAMS["w"] - 0.1 * np.sin(PARAMS["w"]), rtol=1e-5)
