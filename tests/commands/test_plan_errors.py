"""A plan in which one strategy cannot be built: the others have their rows."""

import json

import pytest

from research_dp.commands import failures
from research_dp.errors import UsageError
from research_dp.strategies import StrategyConfig
from tests.support.plans import DIGITS, MLP, plan


def injured(monkeypatch, error):
    """Has one strategy's trace fail as it does where JAX refuses its devices."""
    original = StrategyConfig.build

    def build(recipe, spec):
        if recipe.name == "zero1":
            raise error
        return original(recipe, spec)

    monkeypatch.setattr(StrategyConfig, "build", build)


def test_an_error_of_one_strategy_is_a_row_beside_the_others(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(failures, "is_of_users_code", lambda error: False)  # it is this file's
    injured(monkeypatch, ValueError("devices must form a subcube\nmore"))
    file = tmp_path / "plan.json"
    flags = [DIGITS, MLP, "--topology=cpu:8", "--gin.mlp.widths=(4,)"]
    assert plan(*flags, "--strategies=zero1,single", f"--json={file}") == 0
    found = json.loads(file.read_text())["strategies"]
    assert found["zero1"]["problem"] == "refused: ValueError: devices must form a subcube"
    assert found["single"]["fits"]
    with pytest.raises(UsageError, match=r"^zero1: refused: ValueError: devices must "):
        plan(*flags, "--strategies=zero1")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a fault of this package"),
        ValueError("a fault of the user's own code"),
    ],
)
def test_a_fault_is_not_taken_for_a_strategy_that_cannot_be_planned(monkeypatch, error):
    injured(monkeypatch, error)
    with pytest.raises(type(error), match="a fault of"):
        plan(DIGITS, MLP, "--topology=cpu:8", "--strategies=zero1")
