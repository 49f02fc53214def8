"""Compilers for devices that are not here: installed by extras, so that some tests are skipped."""

import importlib.util

import pytest

_MODULES = {"gpu": "jax_cuda13_plugin", "tpu": "libtpu"}


def needs_compiler(platform):
    """The mark of a test that compiles for a platform. It is slow too: quick ones need none."""
    module = _MODULES[platform]
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"{module} is not installed: pip install -e '.[plan-{platform}]'",
    )
