"""Records in tests/golden/ that later versions are compared with."""

import json
import os
from pathlib import Path

from tests.support.repository import ROOT, relative

FOLDER = ROOT / "tests" / "golden"


def updates():
    """Whether records are rewritten instead of compared."""
    return bool(os.environ.get("UPDATE_GOLDEN"))


def command(test):
    """The command that rewrites the records of a test file."""
    return f"UPDATE_GOLDEN=1 pytest -q -m '' {relative(Path(test).resolve())}"


def recorded(name, found=None):
    """A JSON record; `found` replaces it first if records are rewritten."""
    path = FOLDER / f"{name}.json"
    if updates() and found is not None:
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return json.loads(path.read_text())


def changes(before, after, path=""):
    """Lines that say where two values of dicts and lists differ.

    Lists are compared as sets of lines: the order of names makes no difference.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in changes(before.get(key), after.get(key), f"{path}/{key}")
        ]
    if isinstance(before, list) and isinstance(after, list):
        gone = [f"- {path}: {item}" for item in before if item not in after]
        return gone + [f"+ {path}: {item}" for item in after if item not in before]
    return [] if before == after else [f"- {path}: {before}", f"+ {path}: {after}"]
