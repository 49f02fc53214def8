"""What a command says when more than one thing went wrong."""

import contextlib
import functools
import importlib
import sys

import gin
import jax
import pytest

from research_dp.commands import cli, failures
from research_dp.config import gin_internals
from research_dp.distributed import mesh
from research_dp.errors import RunFailure, UsageError, at_end


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
    monkeypatch.setattr(failures.jax_setup, "leave", lambda status: status)

    # Gin raises a copy, which hides what came before.
    @gin.configurable(f"fails_{status}", module="tests")
    def body():
        with closing_fails(later):
            raise RunFailure("no number")

    assert failures.run_command(body) == status
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("first", "status", "told"),
    [
        (RunFailure, 1, "error: RESOURCE_EXHAUSTED: no memory\n"),
        (UsageError, 2, "error: RESOURCE_EXHAUSTED: no memory\n"),
        (KeyboardInterrupt, 130, ""),
        (functools.partial(ZeroDivisionError, "mine"), 1, "ZeroDivisionError: ('mine', "),
        (jax.errors.JaxRuntimeError, 1, "A device has too little memory."),
    ],
)
@pytest.mark.parametrize("second", [RunFailure, UsageError, OSError, SystemExit])
def test_what_fails_while_an_error_ends_a_command_is_told_once_after_it(
    first, status, told, second, capsys, monkeypatch
):
    monkeypatch.setattr(failures.jax_setup, "leave", lambda status: status)

    def close():
        raise second("not closed")

    def body():
        with at_end(lambda: None), at_end(close):
            raise first("RESOURCE_EXHAUSTED: no memory")

    with gin_internals.kept():
        called = gin.external_configurable(body, f"ends_{id(body)}", module="tests")
        assert failures.run_command(called) == status
    said = capsys.readouterr().err
    assert told in said and said.count("also: ") == 1
    assert said.splitlines()[-1].startswith("also: ") and "Traceback" not in told


def test_what_was_answered_is_not_told(capsys, monkeypatch):
    monkeypatch.setattr(failures.jax_setup, "leave", lambda status: status)

    def body():
        try:
            raise RunFailure("one way")
        except RunFailure:
            raise RunFailure("neither way") from None

    assert failures.run_command(body) == 1
    assert capsys.readouterr().err == "error: neither way\n"


OWN = """
import sys

import jax

def innermost():
    raise ValueError("mine")

def loss(x):
    try:
        innermost()
    except ValueError as error:
        raise KeyError("also mine") from error

def traced(x):
    return jax.jit(lambda y: y + jax.numpy.ones((7, 3)))(x)

def calls(function):
    return function()

def leaves():
    sys.exit(0)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_code")
    del sys.modules["own_code"]


def raises(body, capsys):
    """What is said of an error in the body of a command, which gin calls."""
    with gin_internals.kept():
        called = gin.external_configurable(body, f"raises_{id(body)}", module="tests")
        assert failures.run_command(called) == 1
    return capsys.readouterr().err


def test_an_error_in_code_of_the_users_own_has_its_frames_alone(own, capsys):
    said = raises(lambda: jax.grad(own.loss)(1.0), capsys)
    lines = said.splitlines()
    assert lines[0].startswith(
        "error: code outside research_dp failed (JAX_TRACEBACK_FILTERING=off"
    )
    assert lines[-1] == "KeyError: 'also mine'"
    assert lines[-3].endswith("line 13, in loss") and "own_code.py" in lines[-3]
    assert "ValueError: mine" in said and "in innermost" in said
    assert (
        " at 0x" not in said and "site-packages" not in said and "commands/failures.py" not in said
    )


def test_own_code_that_ends_the_process_has_failed_whatever_its_status(own, capsys):
    said = raises(own.leaves, capsys)
    assert "line 22, in leaves" in said and said.splitlines()[-1] == "SystemExit: 0"
    with pytest.raises(SystemExit, match="0"):  # by this package itself
        failures.run_command(lambda: cli.parse("train", ["--help"]))


def test_what_a_library_refuses_is_shown_where_own_code_asked_for_it(own, capsys):
    said = raises(lambda: own.traced(jax.numpy.ones((2, 2))), capsys)
    assert "in traced" in said and "site-packages" not in said
    assert "add got incompatible shapes" in said.splitlines()[-1]


def test_a_function_called_wrongly_is_named_only_if_no_other_has_its_name(capsys):
    def defined(source, file):
        names = {}
        exec(compile(source, file, "exec"), names)
        return names

    package = str(failures._PACKAGE / "caller.py")
    call = defined("def call(function):\n    return function()\n", package)["call"]
    mine = defined("\ndef called_wrongly(x):\n    pass\n", "/mine/own.py")["called_wrongly"]
    said = raises(lambda: call(mine), capsys)
    assert said.startswith("error: /mine/own.py:2: called_wrongly() missing 1 required")
    others = defined("def called_wrongly(a, b):\n    pass\n", "/mine/other.py")
    said = raises(lambda: call(mine), capsys)
    assert said.startswith("error: called_wrongly() missing 1 required"), others


def test_an_error_of_this_package_keeps_all_frames_also_where_own_code_called_it(own, capsys):
    said = raises(lambda: own.calls(lambda: mesh.sizes_text(None)), capsys)
    assert "Traceback" in said and "mesh.py" in said and "in calls" in said
    assert "site-packages" not in said and " at 0x" not in said


@contextlib.contextmanager
def all_frames():
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_all_frames_are_shown_on_request(own, capsys):
    with all_frames():
        assert "commands/failures.py" in raises(lambda: own.loss(1.0), capsys)


def test_an_allocation_that_fails_on_a_device_is_told_in_two_lines(capsys, monkeypatch):
    monkeypatch.setattr(failures.jax_setup, "leave", lambda status: status)

    def body():
        try:
            jax.numpy.zeros(2**45).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError("the step failed") from error

    assert failures.run_command(body) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.startswith("error: RESOURCE_EXHAUSTED: Out of memory")
    assert "plan --topology=here --strategies=all` with the same flags says what" in error
    with all_frames():
        assert failures.run_command(body) == 1
    assert "Traceback" in capsys.readouterr().err


def test_other_things_than_memory_may_be_exhausted(capsys, monkeypatch):
    monkeypatch.setattr(failures.jax_setup, "leave", lambda status: status)

    def body():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Received message larger than max")

    assert failures.run_command(body) == 1
    assert "Traceback" in capsys.readouterr().err
