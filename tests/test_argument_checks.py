"""Arguments against annotations: what a function, class or tree refuses, and in what words."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research_dp import UsageError, from_linen, infer_sharding, shard_params, sharded_global_norm
from research_dp.argument_checks import annotation_of, checked, fits
from research_dp.argument_types import Arrays, AxisNames, Count, Dtype, Numbers, arrays_like


@checked
def function(
    count: Count = 1,
    names: Sequence[str] = (),
    mode: Literal["a", "b"] = "a",
    kind: type[dict] | None = None,
    sizes: Mapping[str, int] | None = None,
    *rest: Any,
    needed: dict[str, int] = gin.REQUIRED,
    **others: Any,
) -> int:
    """Its docstring."""
    return count


@checked
def trees(
    tree: Arrays,
    like: Annotated[Any, arrays_like("tree")] = None,
    values: Numbers = (),
    axes: AxisNames = (),
    dtype: Dtype | None = None,
    call: Callable[..., Any] | None = None,
    unread: "Missing" = None,  # noqa: F821
):
    return tree


@checked
def required(*, needed: int = gin.REQUIRED) -> int:
    return needed


def test_a_checked_function_keeps_its_name_signature_and_result():
    assert function(3, needed={}) == 3
    assert function.__name__ == "function" and function.__doc__ == "Its docstring."
    assert list(inspect.signature(function).parameters)[:2] == ["count", "names"]
    assert inspect.getfullargspec(function).args[:2] == ["count", "names"]  # what gin asks
    assert function(np.int64(2), ["a"], "b", dict, {"a": 1}, None, needed={"a": 1}, more=1) == 2


def test_a_dict_with_a_wrong_value_is_refused_with_a_right_one():
    said = r"bounds = \{'next': 32\}: give a dict of array -> key of `config`, e\.g\. \{'y': "
    with pytest.raises(UsageError, match=said):
        from_linen(nn.Dense(3), loss=jnp.subtract, bounds={"next": 32})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "function.needed is missing: give a dict of integers."),
        ({"count": True}, "function.count = True: give an integer of at least 1."),
        ({"count": 0}, "function.count = 0: give an integer of at least 1."),
        ({"names": "ab"}, "function.names = 'ab': give a tuple or list of strings."),
        ({"mode": "c"}, "function.mode = 'c': use one of ['a', 'b']."),
        ({"kind": list}, "function.kind = <class 'list'>: give a type, or None."),
        ({"sizes": {"a": "1"}}, "function.sizes = {'a': '1'}: give a dict of integers, or None."),
        ({"count": np.float16}, "function.count = <class 'numpy.float16'>: give an integer"),
        ({"count": len}, "function.count = <built-in function len>: give an integer"),
        ({"count": test_a_checked_function_keeps_its_name_signature_and_result}, "itself. Give"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(arguments, message):
    with pytest.raises(UsageError) as caught:
        function(**arguments, **({} if not arguments else {"needed": {}}))
    assert message in str(caught.value)
    assert caught.value.binding.startswith("function.")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trees(), "trees() missing 1 required positional argument: 'tree'"),
        (lambda: trees((), call=len, tree=()), "trees() got multiple values for argument 'tree'"),
        (lambda: trees((), axis="data"), "trees() got an unexpected keyword argument 'axis'"),
        (lambda: required(axis="data"), "required() got an unexpected keyword argument 'axis'"),
        (lambda: shard_params({}), "shard_params() missing 1 required positional argument: 'axis_"),
    ],
)
def test_a_call_that_does_not_fit_the_signature_is_pythons_own_error(call, message):
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        call()
    assert caught.value.__context__ is None


def test_what_cannot_be_read_or_is_not_given_is_accepted():
    assert trees({}, unread=object()) == {}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'tree'"):
        trees()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "trees.tree = None: give arrays of numbers."),
        (({"a": {"b": "c"}},), "trees.tree: leaf 'a/b' is 'c'. Give arrays of numbers."),
        (
            ([jax.random.key(0)],),
            "trees.tree: leaf '0' is an array of shape () and dtype key<fry>. Give arrays",
        ),
        ((np.zeros(2, jax.dtypes.float0),), "trees.tree = an array of shape (2,) and dtype float0"),
        (({1: jnp.ones(1), "a": jnp.ones(1)},), "trees.tree: it is no pytree"),
        (({"a": jnp.ones(1)}, {"b": jnp.ones(1)}), "trees.like differs from tree in 'a': give"),
        (({}, {}, {"a": "1"}), "trees.values: leaf 'a' is '1'."),
        (({}, {}, (), 3), "trees.axes = 3: give the name of a mesh axis, or several"),
        (({}, {}, (), ("a", 3)), "trees.axes = ('a', 3): give"),
        (({}, {}, (), (), np.ones(1)), "trees.dtype = an array of shape (1,) and dtype float64"),
        (({}, {}, (), (), None, 3), "trees.call = 3: give a function, or None."),
    ],
)
def test_a_wrong_tree_is_refused_with_the_path_of_its_leaf(arguments, message):
    with pytest.raises(UsageError) as caught:
        trees(*arguments)
    assert message in str(caught.value)


def test_arrays_may_be_traced_boxed_or_of_numpy():
    tree = {"a": jnp.ones(1), "b": [np.float32(1), np.ones(1, bool)], "c": jnp.ones(1, jnp.int4)}
    assert trees(tree, tree, (1.0, 2), (("a", "b"),), "bfloat16") is tree
    assert jax.jit(trees)(tree)["a"] == 1


def test_a_checked_class_checks_what_it_is_made_of():
    @checked
    @dataclasses.dataclass(frozen=True)
    class Record:
        size: int
        names: dict = dataclasses.field(default_factory=dict)

    assert Record(3) == Record(size=3)
    assert list(inspect.signature(Record).parameters) == ["size", "names"]
    with pytest.raises(UsageError, match=r"Record\.size = '3': give an integer"):
        Record("3")


def test_a_tree_like_another_is_judged_by_itself_where_that_is_not_given():
    layout = annotation_of(sharded_global_norm, "layout")
    assert not fits({"a": {"b": "fsdp"}}, layout)
    assert fits(infer_sharding({"a": {"b": jnp.ones(2)}}, None, 8), layout)
