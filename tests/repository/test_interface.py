"""All names that users depend on, compared with the record of them in tests/golden/interface.json.

Modules are not listed, but for those that gin files and the documentation import: code may move.
"""

import ast
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import gin

import research_dp
from tests.support import golden
from tests.support.commands import command, output
from tests.support.repository import ROOT

COMMANDS = ["train", "plan", "certify", "conform", "sweep", "evaluate", "checkpoints", "launch"]
TOOLS = ["prepare_data", "generate"]


def value(default):
    """A default as text that is the same in every process."""
    if default is gin.REQUIRED:
        return "REQUIRED"
    if callable(default):
        return getattr(default, "__name__", type(default).__name__)
    # Functions inside are private, and differ from process to process.
    return re.sub(r"\(.*<function.*", "(...)", re.sub(r" at 0x[0-9a-f]+", "", repr(default)))


def signature(function):
    """Parameters, kinds and defaults; annotations are no part of it, as types may be renamed."""
    try:
        found = inspect.signature(function)
    except ValueError:
        return "(...)"
    parameters = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else Text(p.default))
        for p in found.parameters.values()
    ]
    plain = found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return str(plain)


class Text:
    """Shown as a default's text."""

    def __init__(self, default):
        self.text = value(default)

    def __repr__(self):
        return self.text


def members(kind):
    """A class's own public members, with the signatures of its methods."""
    names = {*dir(kind), *getattr(kind, "__annotations__", ())}
    inherited = {name for base in kind.__mro__ if not in_package(base) for name in vars(base)}
    lines = []
    for name in sorted(names - inherited):
        member = getattr(kind, name, None)
        if not name.startswith("_"):
            lines.append(f".{name}{signature(member) if callable(member) else ''}")
    return lines


def in_package(kind):
    return kind.__module__.startswith("research_dp")


def public_names():
    lines = []
    for name in sorted(research_dp.__all__):
        found = getattr(research_dp, name)
        lines.append(name + (signature(found) if callable(found) else ""))
        if inspect.isclass(found):
            lines += [f"{name}{member}" for member in members(found)]
    return lines


def documented_imports():
    """Names of other modules that README.md and docs/ import in their examples."""
    found = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("research_dp."):
                    found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(found)


def flags(text):
    """The part of a help text that names the flags, on one line."""
    usage = text.partition("\n\n")[0]
    return " ".join(usage.split())


def gin_names():
    """Functions with parameters and defaults, and files, as `train --list --json` has them."""
    functions, files = [], []
    groups = json.loads(command("train", "--list", "--json")[0])
    for entry in (entry for group in groups for entry in group["entries"]):
        if "selector" not in entry:
            files.append(entry["name"])
            continue
        if not entry["file"].startswith(("research_dp/", "optax/")):
            continue  # another test registered it
        # A function that was registered without a module is bound by its name alone.
        selector = entry["selector"]
        name = entry["name"] if selector.startswith("research_dp.") else selector
        # Optax's parameters are its own.
        parameters = {} if name.startswith("optax.") else entry["parameters"]
        for parameter, known in parameters.items():
            default = "REQUIRED" if known["required"] else known["default"]
            text = "" if default is None else f" = {default}"
            functions.append(f"{name}.{parameter}{text}")
        functions.append(f"{name}()")
    return sorted(functions), sorted(files)


def gin_imports():
    """Modules that shipped gin files import, and with them users' files."""
    texts = [path.read_text() for path in (ROOT / "gin").rglob("*.gin")]
    return sorted({m for text in texts for m in re.findall(r"^import (\S+)", text, re.MULTILINE)})


def gin_macros():
    """Macros that a shipped file binds and another one uses."""
    texts = [path.read_text() for path in (ROOT / "gin").rglob("*.gin")]
    return sorted({m for text in texts for m in re.findall(r"%(\w+)", text)})


MISTAKES = {  # command line -> exit status
    "train": ["", "--gin_file=nowhere.gin --workdir=w", "--gin.trian.seed=1 --workdir=w", "--json"],
    "plan": ["", "--gin_file=nowhere.gin --topology=cpu:8", "--gin_file=runs/digits.gin"],
    "certify": ["", "--gin_file=nowhere.gin"],
    "conform": ["", "--gin_file=nowhere.gin"],
    "sweep": ["", "--gin_file=runs/digits.gin --workdir=w --vary.train.seed="],
    "evaluate": ["", "--workdir=nowhere"],
    "checkpoints": ["", "nowhere"],
    "launch": ["", "-n 2", "-n 0 -- --workdir=w"],
}


def interface():
    functions, files = gin_names()
    shown = {name: command(name, "--help") for name in COMMANDS}
    tools = {
        f"tools/{name}.py": output(
            lambda name=name: runpy.run_path(str(ROOT / "tools" / f"{name}.py"), {}, "__main__"),
            "--help",
        )
        for name in TOOLS
    }
    mistakes = [
        f"{name} {words}: {command(name, *shlex.split(words))[1]}"
        for name, lines in MISTAKES.items()
        for words in lines
    ]
    return {
        "python names of research_dp": public_names(),
        "python names that the documentation imports": documented_imports(),
        "gin functions": functions,
        "gin files": files,
        "gin modules that files import": gin_imports(),
        "gin macros": gin_macros(),
        "flags": {name: flags(text) for name, (text, _) in (shown | tools).items()},
        "exit status of mistakes": mistakes,
    }


def test_names_that_users_depend_on_are_the_recorded_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(ROOT / "tools")  # as Python does for a script
    found = interface()
    differs = golden.changes(golden.recorded("interface", found), found)
    assert not differs, "\n".join([*differs, "If this is meant: python tools/generate.py"])


def test_an_option_is_added_by_one_edit(tmp_path):
    """Its declaration is the flag, the help text, the parameter in Python and the row in gin.md."""
    for folder in ("research_dp", "tools", "gin"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    module = tmp_path / "research_dp" / "commands" / "plan.py"
    text = module.read_text()
    declared, told = "    measure: bool = False,\n", "        html_file: Where"
    text = text.replace(declared, f"{declared}    hops: Count | None = None,\n", 1)
    text = text.replace(told, f"        hops: Most hops of a collective; None: any.\n{told}", 1)
    module.write_text(text)
    code = (
        "import inspect, sys, research_dp, research_dp.plan\n"
        "assert 'hops' in inspect.signature(research_dp.plan).parameters\n"
        "sys.path.insert(0, 'tools')\n"
        "import gin_page\n"
        "print(gin_page.flags('plan'))\n"
        "research_dp.plan.main(['--topology=cpu:1', '--gin_file=runs/digits.gin', '--hops=0'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert "| `--hops N` | Most hops of a collective; without it any. |" in done.stdout, done.stderr
    assert "error: argument --hops: '0' is not a whole number of at least 1" in done.stderr
