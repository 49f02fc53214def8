"""How tests compile: flags for CPUs, and compilers for devices that are not here.

The compilers are installed by extras, so that some tests are skipped.
"""

import importlib.util

import jax
import pytest

_MODULES = {"gpu": "jax_cuda13_plugin", "tpu": "libtpu"}


def needs_compiler(platform):
    """The mark of a test that compiles for a platform. It is slow too: quick ones need none."""
    module = _MODULES[platform]
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"{module} is not installed: pip install -e '.[plan-{platform}]'",
    )


# Tests compile much and compute little: XLA:CPU compiles in half the time without LLVM's passes,
# and in half of that without the emitters of fusions that go through MLIR. Not so the commands,
# which tests run as users do: flags are read at the first compilation here.
# JAX 0.11.2 has no others, and no such flag.
COMPILES_FAST = "--xla_backend_optimization_level=0"
AS_USERS_COMPILE: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11, 2):
    COMPILES_FAST += " --xla_cpu_use_fusion_emitters=false"
    AS_USERS_COMPILE |= {"xla_cpu_use_fusion_emitters": True}
