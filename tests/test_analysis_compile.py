"""A program that does not fit is an answer, told apart from an error."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from research_dp.analysis.compile import (
    DoesNotFitError,
    compile_to_fit,
    dump_options,
    text_of,
)
from research_dp.analysis.topologies import topology


class Lowered:
    def __init__(self, message):
        self.message = message

    def compile(self, options):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (25.00G) exceeds available HBM (15.75G). HLO module: jit_f.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 25.00G of 15.75G hbm.",
    ],
)
def test_does_not_fit(message):
    with pytest.raises(DoesNotFitError, match=r"needs 26\.84 GB of 16\.91") as caught:
        compile_to_fit(Lowered(message))
    assert caught.value.limit_bytes == 15.75 * 2**30


def test_other_errors_stay():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_to_fit(Lowered("INTERNAL: libdevice not found"))


def test_what_fits_compiles():
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert compile_to_fit(lowered, {}).memory_analysis().argument_size_in_bytes == 32


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_program_that_does_not_fit():
    where = topology("v5e-4")
    rows = NamedSharding(where.mesh((4,), ("fsdp",)), P("fsdp"))
    x = jax.ShapeDtypeStruct((4 * 20480, 65536), jnp.float32, sharding=rows)
    lowered = jax.jit(lambda x: (jnp.sort(x, 0)[::-1], x + 1), out_shardings=rows).lower(x)
    with pytest.raises(DoesNotFitError):
        compile_to_fit(lowered)


def test_a_program_is_printed_by_its_compiler_where_jaxlib_may_not_be_able_to(tmp_path):
    class Newer:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: unknown")

    assert dump_options("gpu", tmp_path) == {}
    assert dump_options("tpu", tmp_path)["xla_dump_to"] == str(tmp_path)
    with pytest.raises(jax.errors.JaxRuntimeError):
        text_of(Newer(), tmp_path)
    (tmp_path / "module_1.jit_convert.after_codegen.txt").write_text("small")
    (tmp_path / "module_2.jit_train.after_codegen.txt").write_text("the larger one")
    (tmp_path / "module_2.jit_train.after_optimizations.txt").write_text("before: larger still")
    assert text_of(Newer(), tmp_path) == "the larger one"
