"""What a command says when more than one thing went wrong."""

import contextlib

import gin
import pytest

from research_dp.config import ending
from research_dp.distributed.errors import RunFailure, UsageError


@contextlib.contextmanager
def closing_fails(error):
    try:
        yield
    finally:
        raise error


@pytest.mark.parametrize(
    ("later", "status", "told"),
    [
        (RunFailure("not saved"), 1, "error: no number\nerror: not saved\n"),
        (UsageError("no folder"), 2, "error: no number\nerror: no folder\n"),
    ],
)
def test_what_came_first_is_told_first(later, status, told, capsys, monkeypatch):
    monkeypatch.setattr(ending.environment, "leave", lambda status: status)

    # Gin raises a copy, which hides what came before.
    @gin.configurable(f"fails_{status}", module="test_ending")
    def body(session):
        with closing_fails(later):
            raise RunFailure("no number")

    assert ending.told(body) == status
    assert capsys.readouterr().err == told


def test_what_was_answered_is_not_told(capsys, monkeypatch):
    monkeypatch.setattr(ending.environment, "leave", lambda status: status)

    def body(session):
        try:
            raise RunFailure("one way")
        except RunFailure:
            raise RunFailure("neither way") from None

    assert ending.told(body) == 1
    assert capsys.readouterr().err == "error: neither way\n"
