"""What is used of gin's insides is there, and does what is expected: a new version may differ."""

import gin
import pytest

from research_dp.config import gin_internals


def test_the_insides_of_gin_are_what_they_were():
    assert {"wrapped", "denylist"} <= set(gin.config._REGISTRY["gin.macro"]._fields)
    for name in (*gin_internals._MUTABLE, "_IMPORTS", "_CONSTANTS"):
        assert hasattr(gin.config, name), f"gin.config has no {name} any more"
    assert gin_internals.matching("macro") == ["gin.macro"]
    assert gin_internals.constants() == ["gin.REQUIRED"]


def test_registered_functions_are_found_without_gins_own():
    from research_dp.strategies import mapped

    known = gin_internals.configurables()
    assert known["strategies.mapped"].function is mapped
    assert not [name for name in known if name.startswith("gin.")]


@pytest.mark.parametrize("locked", [False, True])
def test_what_was_bound_is_put_back(locked):
    gin.parse_config("import math\nNAME = 3\nmake_mesh.axes = {'data': %NAME}")
    if locked:
        gin.finalize()
    before = gin.config_str()
    with gin_internals.kept():
        gin.clear_config()
        gin.parse_config("make_mesh.axes = {'data': 8}")
        gin.finalize()
    assert gin.config_str() == before
    assert gin.config_is_locked() == locked
