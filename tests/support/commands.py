"""What commands print, run in this process."""

import contextlib
import importlib
import io
import sys


def output(function, *words):
    """What a function prints, given a command line; and its exit status."""
    argv, text, status = sys.argv, io.StringIO(), 0
    try:
        sys.argv = ["", *words]
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            status = function()
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = argv
    return text.getvalue(), status


def command(name, *words):
    return output(lambda: importlib.import_module(f"research_dp.{name}").main(list(words)), *words)
