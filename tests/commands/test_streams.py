"""Standard streams that cannot be written end a listing with a word, and a run never."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from research_dp import conform
from research_dp.commands import failures, streams
from research_dp.errors import UsageError
from tests.support.processes import RUN
from tests.support.repository import ROOT
from tests.support.runs import summary

FULL, CLOSED, BROKEN, HUNG_UP = "No space", "Bad file descriptor", "Broken pipe", "Input/output"
DEAD = [FULL, CLOSED, BROKEN, HUNG_UP]
LONG = 10**5  # more than a buffer takes


def dead_descriptor(kind):
    if kind == FULL:
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.openpty() if kind == HUNG_UP else os.pipe()
    os.close(reader)
    return writer


@contextlib.contextmanager
def dead(monkeypatch, name, kind):
    """Puts a dead stream in the place of a standard one; it must be whole again at the end."""
    stream = None if kind == CLOSED else os.fdopen(dead_descriptor(kind), "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, name, stream)
        yield
        getattr(sys, name).flush()  # as the interpreter does when it ends
        getattr(sys, name).close()


def prints(size, stream="stdout"):
    def body():
        print("x" * size, file=getattr(sys, stream))
        return 0

    return body


def trains(size, stream="stdout"):
    def body():
        with streams.dispensable():
            prints(size, stream)()
            thread = threading.Thread(target=prints(size, stream))
            thread.start()
            thread.join()
            getattr(sys, stream).writelines(["a", "b"])
            getattr(sys, stream).flush()
            return 143

    return body


def refuses():
    raise UsageError("a mistake")


def asks_for_help():
    print("usage")
    raise SystemExit(0)


@pytest.mark.parametrize("kind", DEAD)
@pytest.mark.parametrize("size", [1, LONG])
def test_a_result_that_cannot_be_printed_is_a_failure(monkeypatch, capfd, kind, size):
    with dead(monkeypatch, "stdout", kind):
        status = failures.run_command(prints(size))
    said = capfd.readouterr().err
    assert status == (141 if kind == BROKEN else 1)
    assert said.count("\n") == (kind != BROKEN) and (kind == BROKEN or kind in said)


@pytest.mark.parametrize("kind", DEAD)
@pytest.mark.parametrize("size", [1, LONG])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_does_not_end_with_its_output(monkeypatch, capfd, kind, size, stream):
    with dead(monkeypatch, stream, kind):
        assert failures.run_command(trains(size, stream)) == 143
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", DEAD)
def test_standard_error_has_no_say_in_how_a_command_ends(monkeypatch, kind):
    with dead(monkeypatch, "stderr", kind):
        assert failures.run_command(prints(1, "stderr")) == 0
    with dead(monkeypatch, "stderr", kind):
        assert failures.run_command(refuses) == 2


def test_the_notice_of_an_old_name_is_no_output(monkeypatch, capfd):
    with dead(monkeypatch, "stderr", CLOSED), pytest.raises(SystemExit):
        conform.main(["--help"])
    assert capfd.readouterr().out.startswith("usage: ")


def test_help_that_cannot_be_printed_is_a_failure(monkeypatch, capfd):
    with dead(monkeypatch, "stdout", FULL):
        assert failures.run_command(asks_for_help) == 1
    assert FULL in capfd.readouterr().err


def test_letters_that_a_stream_lacks_are_escaped(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)

        def body():
            print("Ä\udc80")
            return 0

        assert failures.run_command(body) == 0
    assert (tmp_path / "out").read_text() == "\\xc4\\udc80\n"


def test_another_pipe_that_breaks_is_an_error_like_any(monkeypatch, capfd):
    def body():
        os.write(dead_descriptor(BROKEN), b"x")

    with dead(monkeypatch, "stdout", BROKEN):
        assert failures.run_command(body) == 1
    assert "BrokenPipeError" in capfd.readouterr().err


def test_output_is_back_when_a_disk_has_room_again(monkeypatch, tmp_path):
    with open(tmp_path / "log", "w") as file, streams.dispensable():
        full = os.fdopen(dead_descriptor(FULL), "w")
        monkeypatch.setattr(sys.stdout, "wrapped", full)
        print("lost" * LONG, flush=True)
        os.dup2(file.fileno(), full.fileno())
        print("back", flush=True)
        full.close()
    assert (tmp_path / "log").read_text().endswith("back\n")


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = command(*RUN, "--gin.train.num_steps=200", f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    return summary(folder)["params_fingerprint"]


@contextlib.contextmanager
def started(command, tmp_path, stdout, stderr, closed=""):
    """A run with these descriptors; `closed`: those that its shell closes."""
    program = [sys.executable, "-m", "research_dp.train", *RUN, "--gin.train.num_steps=200"]
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *program, f"--workdir={tmp_path}"],
        stdout=stdout,
        stderr=stderr,
        cwd=ROOT,
        start_new_session=True,
        env=command.environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_terminal_that_closes_does_not_end_the_run(command, tmp_path, undisturbed):
    master, slave = os.openpty()
    with started(command, tmp_path, slave, slave) as process:
        os.close(slave)
        seen = b""
        while b"First step done" not in seen:
            seen += os.read(master, 4096)
        os.close(master)
        assert process.wait(timeout=100) == 0, seen
    assert b"step 0/200" in seen, "no bar was shown"
    assert summary(tmp_path)["params_fingerprint"] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FULL, CLOSED, BROKEN])
def test_a_stream_that_is_dead_from_the_start_does_not_end_the_run(
    command, tmp_path, undisturbed, kind
):
    stream = None if kind == CLOSED else dead_descriptor(kind)
    closed = ">&- 2>&-" if kind == CLOSED else ""
    with started(command, tmp_path, stream, stream, closed) as process:
        assert process.wait(timeout=100) == 0
    assert summary(tmp_path)["params_fingerprint"] == undisturbed
