"""The blocks of a page, how they are run, and how their output is compared.

A line above a block says what it is, if it is not run in order with the others:

    <!-- file: PATH -->        equals a file of the repository, or a contiguous part of one
    <!-- write: PATH -->       is written to PATH in the working directory
    <!-- not run: REASON -->   is not run
    <!-- varies: REASON -->    is run; its words are compared, its numbers are not
    <!-- ci: NAME -->          is run by .ci/run
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from research_dp.config import binding_checks, load, parser
from tests.support import terminal
from tests.support.repository import ROOT, relative

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"<!-- (file|write|not run|varies|ci): (.*?) -->")
RUN = ("python", "bash", "console")
LINKS = ("gin", "examples", "experiments", "tools")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a page: its kind, its text and what the line above it says."""

    page: Path
    line: int  # of its first line of text, from 0
    kind: str
    text: str
    indent: str
    mark: str  # "", or one of MARK's
    value: str

    def __str__(self):
        return f"{relative(self.page)}:{self.line}"

    @property
    def runs(self):
        return self.kind in RUN and self.mark in ("", "varies")


def blocks(page):
    """The blocks of a page, from top to bottom."""
    text, found = page.read_text(), []
    for fence in FENCE.finditer(text):
        above = text[: fence.start()].rstrip().rpartition("\n")[2].strip()
        mark = MARK.fullmatch(above)
        start = fence.start("text")
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, start),
                kind=fence["kind"].strip(),
                text=textwrap.dedent(fence["text"]),
                indent=fence["indent"],
                mark=mark[1] if mark else "",
                value=mark[2] if mark else "",
            )
        )
    return found


def commands(block):
    """(command, output) for each `$ command` of a console block; `\\` continues a line."""
    found = re.split(r"^\$ ((?:.*\\\n)*.*)\n", block.text, flags=re.MULTILINE)
    assert not found[0].strip(), f"{block}: begin with `$ command`"
    return list(zip(found[1::2], found[2::2], strict=True))


# ---- Running ----

# Runs one block after the other in one process, as one program whose lines are the page's.
_INTERPRETER = """
import json as _json, os as _os, sys as _sys
_requests, _done = _sys.stdin, _os.fdopen(int(_sys.argv.pop()), "w")
for _request in _requests:
    _line, _path, _code = _json.loads(_request)
    exec(compile("\\n" * _line + _code, _path, "exec"), globals())
    print("done", file=_done, flush=True)
"""


def _programs(folder):
    """A folder of the programs that pages call: `python`, and the console script of this clone."""
    path = folder.parent / "bin"
    path.mkdir(exist_ok=True)
    for name, words in {"python": "", "research-dp": " -m research_dp"}.items():
        (path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        (path / name).chmod(0o755)
    return path


class Session:
    """An empty folder with links to the repository's, and one Python process, for one page."""

    def __init__(self, folder, data_dir):
        self.folder, self.python = folder, None
        self.log = folder.parent / f"{folder.name}.log"
        folder.mkdir()
        for name in LINKS:
            (folder / name).symlink_to(ROOT / name)
        ours = ("XLA_FLAGS", "JAX_", "PYTEST_", "TFDS_", "UPDATE_", "COLUMNS", "NO_COLOR")
        bare = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        kept = {name: value for name, value in os.environ.items() if "_CACHE_" in name}
        self.env = {
            **bare,
            **{name: value for name, value in kept.items() if name.startswith("JAX_")},
            "JAX_PLATFORMS": "cpu",
            "TFDS_DATA_DIR": str(data_dir),
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "PATH": os.pathsep.join([str(_programs(folder)), os.environ["PATH"]]),
        }

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.python:
            self.python.stdin.close()
            self.python.wait(timeout=60)
            self.replies.close()

    def shell(self, command, timeout=900):
        """A finished command; its output has the errors too."""
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def execute(self, block):
        """Runs a block of Python after those before it."""
        if self.python is None:
            read, write = os.pipe()
            with self.log.open("w") as log:
                self.python = subprocess.Popen(
                    [sys.executable, "-c", _INTERPRETER, str(write)],
                    cwd=self.folder,
                    env=self.env,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[write],
                    text=True,
                )
            os.close(write)
            self.replies = os.fdopen(read)
        request = json.dumps([block.line, str(block.page), block.text])
        print(request, file=self.python.stdin, flush=True)
        assert self.replies.readline(), f"{block} ends with\n{self.log.read_text()[-3000:]}"

    def output(self, command, **more):
        """What a command leaves on a terminal, without the paths of this machine."""
        env = {**self.env, **more}
        _, text = terminal.run(["bash", "-c", command], cwd=self.folder, env=env)
        return text.replace(f"{self.folder}/", "").replace(f"{ROOT}/", "")


# ---- Comparing ----

DOTS = re.compile(r"^ *\.\.\.$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.:/@-])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w:/]|\.\d)")
KINDS = {
    "DATE": re.compile(r"\b\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d)?(?:\.\d+)?)?"),
    "CLOCK": re.compile(r"(?<![\w:])-?[\d-]+:[\d-]{2}(?::[\d-]{2})?(?![\w:])"),
    "HASH": re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,64}\b(?:\.\.\.|…)?"),
    "TIME": re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)? ?(?:ms|us|s|min|seconds|minutes)\b"),
    "RATE": re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?= \w+(?:/s| per second| a second)\b)"),
}


def tokens(text):
    """The words of a text, each with its numbers; marks for what varies between machines."""
    text = re.sub(r"[─━]+", "─", " ".join(text.split()))
    for kind, pattern in KINDS.items():
        text = pattern.sub(kind, text)
    return [(NUMBER.sub("#", word), NUMBER.findall(word)) for word in text.split()]


def close(shown, real):
    """Whether two numbers are one measurement: integers are equal, others within 5 %.

    Sizes of rounding, which have an exponent, are within a factor of 100, or below 1e-5 beside 0.
    """
    if shown == real:
        return True
    a, b = (float(x.replace(",", "")) for x in (shown, real))
    if "e" in shown + real:
        low, high = sorted((abs(a), abs(b)))
        return high <= 100 * (low or 1e-7) and a * b >= 0
    if "." not in shown + real:
        return False
    unit = 10.0 ** -max(len(x.partition(".")[2]) for x in (shown, real))
    return abs(a - b) <= max(0.05 * max(abs(a), abs(b)), 2 * unit)


def matches(shown, real, varies=False):
    """Whether an output has the words and numbers of the one shown, however lines are wrapped.

    A line `...` in what is shown stands for any words. With `varies` numbers may differ.
    """
    first, *others = (tokens(piece) for piece in DOTS.split(shown))
    rest = tokens(real)

    def at(piece, start):
        there = rest[start : start + len(piece)]
        return [word for word, _ in piece] == [word for word, _ in there] and (
            varies
            or all(
                close(a, b)
                for (_, numbers), (_, found) in zip(piece, there, strict=True)
                for a, b in zip(numbers, found, strict=True)
            )
        )

    if not others:
        return len(rest) == len(first) and at(first, 0)
    *middle, last = others
    place, end = len(first), len(rest) - len(last)
    for piece in middle:
        while place <= end and not at(piece, place):
            place += 1
        place += len(piece)
    return at(first, 0) and place <= end and at(last, end)


def rewritten(shown, real):
    """The output to show from now on: a `...` in it still replaces what it left out.

    What is between two `...` begins and ends with the same lines as before.
    """
    lines = [line.rstrip() for line in real.splitlines()]
    pieces = [piece.strip("\n").split("\n") for piece in DOTS.split(shown)]
    words = [[word for word, _ in tokens(line)] for line in lines]

    def find(line, start, otherwise):
        wanted = [word for word, _ in tokens(line)]
        return words.index(wanted, start) if wanted in words[start:] else otherwise

    kept, end = [], 0
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        length = len(piece) if piece != [""] else 0
        start = find(piece[0], end, len(lines) - length if is_last else None) if number else 0
        assert start is not None, f"write this output by hand: it has no {piece[0]!r}"
        end = len(lines) if is_last else find(piece[-1], start, start + length - 1) + 1
        kept.append(lines[start:end] if length else [])
    return "\n...\n".join("\n".join(part) for part in kept).strip("\n") + "\n"


def rewrite(block, command, shown, real):
    """Replaces the output of a command on its page."""
    old, new = f"$ {command}\n{shown}", f"$ {command}\n{rewritten(shown, real)}"
    text = block.page.read_text()
    old, new = (textwrap.indent(x, block.indent) for x in (old, new))
    assert text.count(old) == 1, f"{block}: the same command and output twice"
    block.page.write_text(text.replace(old, new))


def copied(block):
    """Whether a block is a part of the file that it names."""
    return block.text in (ROOT / block.value).read_text()


def write(block, folder):
    """Writes a block to the file that it names."""
    path = folder / block.value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)


def gin_mistakes(text, folder):
    """What is wrong with statements: a file that is not there, a name, a parameter, a value."""
    load.register_all()
    (folder / "block.gin").write_text(text)
    statements = list(parser.read([str(folder / "block.gin")], []))
    bindings = [s for s in statements if isinstance(s, parser.Binding)]
    macros = {b.parameter: b for b in bindings if not b.selector}
    found = [s for s in statements if isinstance(s, parser.Mistake)]
    return [*found, *(m for b in bindings for m in binding_checks.mistakes(b, macros))]


def add_two_level(clone):
    """Adds the strategy of docs/own_strategy.md to a clone, as the page says."""
    page = (ROOT / "docs" / "own_strategy.md").read_text()
    for shown, path in {
        "my_pkg/two_level.py": "research_dp/strategies/two_level.py",
        "gin/strategies/two_level.gin": "gin/strategies/two_level.gin",
    }.items():
        (text,) = re.findall(rf"`{shown}`\n\n<!-- [^\n]* -->\n```\w+\n(.*?)```", page, re.DOTALL)
        assert not (clone / path).exists()
        (clone / path).write_text(text)
