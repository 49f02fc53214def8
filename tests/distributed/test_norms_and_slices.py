"""Limits of norms, complex gradients, sizes and orders of slices, against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp import UsageError
from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.placement import shardings
from research_dp.distributed.sharding import ShardDecision, infer_sharding
from tests.support import calls
from tests.support.steps import SHAPES, mesh_of, on

ADAM = optax.adam(0.1)


# ---- Norms ----


def test_norms_of_complex_gradients_count_both_parts():
    grads = {"w": jnp.full(4, 3 + 4j), "b": jnp.full(3, 2.0)}
    true = np.sqrt(4 * 25 + 3 * 4)
    np.testing.assert_allclose(rdp.sharded_global_norm(grads, ()), true, rtol=1e-6)
    clipped, norm = rdp.clip_by_global_norm_sharded(grads, 1.0, ())
    np.testing.assert_allclose([norm, optax.tree.norm(clipped)], [true, 1.0], rtol=1e-6)
    assert clipped["w"].dtype == grads["w"].dtype


def test_squares_of_float16_do_not_overflow():
    grads = {"w": jnp.full(4, 300, jnp.float16)}
    assert float(rdp.sharded_global_norm(grads, ())) == 600


LIMITS = [-1.0, float("nan"), "1", True, np.float32(-2), jnp.float32(jnp.nan), [1.0]]


def spec(**options):
    return rdp.TrainSpec(**{**calls.SPEC, **options})


@pytest.mark.parametrize("limit", LIMITS, ids=repr)
def test_a_limit_that_is_no_number_of_at_least_zero_is_refused(limit):
    grads = {"w": jnp.ones(4)}
    with pytest.raises(UsageError, match=r"max_norm = .*: give a number of at least 0"):
        rdp.clip_by_global_norm_sharded(grads, limit, ())
    with pytest.raises(UsageError, match=r"max_grad_norm = .*: give a number of at least 0"):
        spec(max_grad_norm=limit)


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_traced_limit_that_is_none_makes_gradients_nan(limit):
    """It is not known when it is traced; a negative factor would climb the loss in silence."""
    grads = {"w": jnp.ones(4)}
    clip = jax.jit(lambda x: rdp.clip_by_global_norm_sharded(grads, x, ())[0]["w"])
    assert np.isnan(clip(limit)).all()
    np.testing.assert_allclose(clip(1.0), 0.5)
    np.testing.assert_array_equal(clip(0.0), 0.0)
    transform = jax.jit(lambda x: rdp.clip_by_global_norm(x, ()).update(grads, None)[0]["w"])
    assert np.isnan(transform(limit)).all()


def test_a_strategy_takes_a_limit_of_zero():
    strategy = calls.recipe().build(spec(max_grad_norm=0))
    state = strategy.init(jax.random.key(0))
    before = np.asarray(state.params["w"])
    batch = {"x": np.ones((16, 8), np.float32)}
    after, _ = strategy.train_step(state, strategy.place_batch(batch))
    np.testing.assert_array_equal(after.params["w"], before)


@pytest.mark.parametrize("limit", [0, 0.5, np.float32(0.5), jnp.float32(0.5), np.array(0.5)])
def test_a_limit_may_be_any_number_and_traced(limit):
    grads = {"w": jnp.ones(4)}
    for function in (rdp.clip_by_global_norm_sharded, jax.jit(rdp.clip_by_global_norm_sharded)):
        clipped, _ = function(grads, limit, ())
        np.testing.assert_allclose(clipped["w"], np.full(4, float(limit) / 2), rtol=1e-6)


# ---- Slices ----


@settings(max_examples=4, deadline=None, derandomize=True)
@example(shape=(3, 4), shards=2)
@example(shape=(2, 3, 5), shards=8)
@given(shape=SHAPES, shards=st.sampled_from([2, 3, 8]))
def test_slices_of_state_are_numpys_ravel_and_pad(shape, shards):
    rng = np.random.default_rng(0)
    params = {"w": np.zeros(shape, np.float32)}
    state = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(x.dtype), jax.eval_shape(ADAM.init, params)
    )
    sliced = rdp.slice_state(ADAM, state, params, shards)
    for own, x in zip(sliced[0][1:], state[0][1:], strict=True):
        flat = np.pad(x["w"].ravel(), (0, -x["w"].size % shards))
        assert own["w"].shape == (1,) * (len(shape) - 1) + flat.shape
        np.testing.assert_array_equal(own["w"].ravel(), flat)
    back = rdp.unsharded_state(ADAM, sliced, params, shards)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_keys_and_what_is_no_array_cannot_be_sliced():
    state = ADAM.init({"w": jnp.ones(4)})
    for leaf, kind in ((jax.random.key(0), ".* dtype key<.*"), (1.0, "1.0")):
        with pytest.raises(UsageError, match=f"leaf 'w' is {kind}. Give arrays of numbers"):
            rdp.slice_state(ADAM, state, {"w": leaf}, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_must_be_of_the_parameters_that_have_gradients(ranks):
    params = {"a": jnp.ones(4), "b": jnp.ones(4)}

    def step(trained, of):
        gradients, state = {k: params[k] for k in trained}, ADAM.init({k: params[k] for k in of})
        state = jax.tree.map(lambda x: x[: 4 // ranks] if x.ndim else x, state)
        return on(mesh_of(r=ranks), lambda: rdp.fsdp_update(gradients, params, ADAM, state))()

    with pytest.raises(UsageError, match="opt_state 0/mu/b is left over"):
        step("a", "ab")
    with pytest.raises(UsageError, match="opt_state 0/mu/b is missing"):
        step("ab", "a")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            ADAM.init({"w": jnp.ones(3)}),
            r"opt_state 0/mu/w has shape \(3,\), not \(4,\)",
        ),
        (ADAM.init({"v": jnp.ones(4)}), "opt_state 0/mu/v is left over"),
        (optax.EmptyState(), "opt_state 0/count is missing"),
    ],
)
def test_a_state_with_which_an_update_fails_is_named(state, message):
    params = {"w": jnp.ones(4)}
    with pytest.raises(UsageError, match=message):
        rdp.OptaxAdapter(ADAM, state).apply_gradients(params, params)


def test_a_failure_of_an_update_that_the_state_does_not_explain_stays():
    def update(grads, state, params):
        raise ZeroDivisionError("of its own")

    params = {"w": jnp.ones(4)}
    with pytest.raises(ZeroDivisionError, match="of its own"):
        rdp.OptaxAdapter(optax.GradientTransformation(ADAM.init, update)).apply_gradients(
            params, params
        )


@pytest.mark.parametrize("group", [("dp", "r"), None])
def test_slices_are_numbered_by_the_names_of_the_axes(group):
    params = {"w": jnp.arange(8.0)}
    transform = optax.trace(0.9)

    def step(params, state):
        return rdp.fsdp_update(params, params, transform, state, fsdp_group=group)

    specs = rdp.slice_specs(transform, params, ("dp", "r"), 4)
    mapped = on(mesh_of(dp=2, r=2), step, (P(), specs), (P(), specs))
    _, state = mapped(params, rdp.slice_state(transform, transform.init(params), params, 4))
    momentum = rdp.unsharded_state(transform, state, params, 4).trace["w"]
    np.testing.assert_array_equal(momentum, params["w"])


def test_a_group_in_another_order_is_refused_with_the_order_to_write():
    params = {"w": jnp.arange(8.0)}
    words = r": slices are numbered .* order is \('r', 'dp'\)\. Write \('dp', 'r'\)"

    def update(group, **axes):
        state = {"w": jnp.zeros(2)}

        def step(params):
            rdp.fsdp_update(params, params, optax.trace(0.9), optax.TraceState(state), **group)
            return rdp.fsdp_apply_gradients(params, params, rdp.OptaxAdapter(ADAM), **group)

        return jax.eval_shape(on(mesh_of(**axes), step), params)

    with pytest.raises(UsageError, match="fsdp_group" + words):
        update({"fsdp_group": ("r", "dp")}, dp=2, r=2)
    with pytest.raises(UsageError, match="fsdp_group = None, all axes" + words):
        update({}, r=2, dp=2)
    with pytest.raises(UsageError, match="axis" + words):
        rdp.slice_specs(ADAM, params, ("r", "dp"), 4)
    update({"fsdp_group": ("dp", "r")}, r=2, dp=2)
    update({}, r=4, dp=1)  # an axis of size 1 does not number anything


def test_state_laid_out_by_hand_in_another_order_is_refused():
    params = {"w": jnp.arange(8.0)}
    state = rdp.slice_state(ADAM, ADAM.init(params), params, 4)
    sharding = jax.sharding.NamedSharding(mesh_of(r=2, dp=2), P(("r", "dp")))
    state = jax.tree.map(lambda x: jax.device_put(x, sharding) if x.ndim else x, state)
    with pytest.raises(UsageError, match=r"state 0/mu/w: .* order is \('r', 'dp'\).*\('dp', 'r'\)"):
        rdp.unsharded_state(ADAM, state, params, 4)


# ---- `fsdp_apply_gradients` in a strategy ----


def stacked_update(reduction=PLAIN):
    """(update of a stack of matrices sharded on eight devices, the stack, its gradients)."""
    layout = infer_sharding({"w": jnp.ones((4, 64, 64))}, lambda *_: ShardDecision(1), 8)

    mesh = mesh_of(fsdp=8)

    def step(params, grads):
        grads = jax.lax.with_sharding_constraint(grads, shardings(mesh, {"w": layout["w"].spec}))
        optimizer = rdp.OptaxAdapter(optax.sgd(1.0))
        options = {"reduction": reduction, "shardings": layout, "mesh": mesh}
        return rdp.fsdp_apply_gradients(grads, params, optimizer, communication_size=1, **options)

    params, grads = {"w": jnp.ones((4, 64, 64))}, jnp.arange(4.0 * 64 * 64).reshape(4, 64, 64)
    return step, jax.device_put(params, NamedSharding(mesh, P())), {"w": grads}


def test_updated_parameters_are_written_over_the_old_ones():
    update, params, grads = stacked_update()
    memory = jax.jit(update, donate_argnums=0).lower(params, grads).compile().memory_analysis()
    size = params["w"].nbytes
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size, "the stack is there twice"
    np.testing.assert_array_equal(jax.jit(update)(params, grads)["w"], 1 - grads["w"])


def test_slices_are_gathered_by_the_reduction_that_is_given():
    def twice(*arguments):
        return 2 * PLAIN.all_gather(*arguments)

    update, params, grads = stacked_update(dataclasses.replace(PLAIN, all_gather=twice))
    np.testing.assert_array_equal(jax.jit(update)(params, grads)["w"], 2 * (1 - grads["w"]))
