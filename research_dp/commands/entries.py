"""The commands by name: their modules, examples and programs; what runs before one is imported.

It imports little, so that help and mistakes in a command's name are quick.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import research_dp


class Entry(NamedTuple):
    """A command, as `research-dp` and its own `--help` describe it."""

    module: str  # with a function `command`, below research_dp.commands
    summary: str
    examples: tuple[str, ...]  # words after the command's name
    details: str = ""
    function: str = ""  # of the module, whose parameters are flags too
    words: str = ""  # the parameter that is no flag, but the words without one
    verb: str = ""  # what it does to gin files, where it needs some, and no `words`
    workdir: str = ""  # why it needs a work folder, where it gets no `words`


INTERRUPTION, INTERRUPTED = "Interrupted: nothing more was done", 130
_RUN = "--gin_file=runs/digits.gin"
_RESULTS = "results and checkpoints go there"
# Parameters whose flags have other names.
FLAGS = {
    **{"gin_files": "gin_file", "bindings": "gin_bindings", "imports": "import"},
    **{"json_file": "json", "html_file": "html"},
}
COMMANDS = {
    "train": Entry(
        "train",
        "trains a model as gin files say, or resumes the run in the workdir",
        (
            f"{_RUN} --workdir=runs/digits",
            f"{_RUN} --gin_file=strategies/zero1.gin --gin.train.seed=1 --workdir=runs/zero1",
            f"{_RUN} --cpu_devices=8 --dry_run",
            "--list strategies",
        ),
        function="run",
        verb="run",
        workdir=_RESULTS,
    ),
    "plan": Entry(
        "plan",
        "says what strategies cost on devices that need not be present",
        (
            f"{_RUN} --topology=cpu:8 --strategies=ddp,fsdp",
            "--gin_file=runs/lm_stdlib.gin --topology=h100:8x8 --strategies=all",
        ),
        "Compiles each strategy's training step for the devices of --topology and reads the "
        "program. Bytes, FLOPs and counts are exact. Times are predicted.",
        function="plan",
        verb="plan",
    ),
    "certify": Entry(
        "certify",
        "checks that a strategy computes what a reference strategy computes",
        (
            f"{_RUN} --gin_file=models/mlp.gin --cpu_devices=8",
            "--quick --gin_file=strategies/hsdp.gin --cpu_devices=8",
        ),
        "Runs your configuration step by step under its strategy and under --against. Prints a "
        "certificate, or the first difference that rounding does not explain, and its cause. "
        "--quick certifies a strategy's file alone on a small built-in run.",
        function="certify",
        verb="certify",
    ),
    "sweep": Entry(
        "sweep",
        "trains the product of files and values, each combination in its own folder",
        (
            f"{_RUN} --vary_file=strategies/fsdp.gin,strategies/zero1.gin --workdir=runs/sweep",
            f"{_RUN} --vary.train.seed=0,1,2 --workdir=runs/seeds",
        ),
        verb="run",
        workdir=_RESULTS,
    ),
    "compare": Entry(
        "compare",
        "compares runs: what differs in their configurations, numbers, bytes, memory and times",
        (
            "runs/sweep/ddp runs/sweep/fsdp --html=compared.html",
            f"{_RUN} --strategies=single,ddp,zero1,fsdp --steps=200 --workdir=runs/compared",
        ),
        "Folders may be of runs that go on. With --strategies what is missing is trained first. "
        "The exit status is 1 if a run died, or something differs that is not of the strategy.",
        function="compare",
        words="runs",
        verb="compare",
        workdir=_RESULTS,
    ),
    "evaluate": Entry(
        "evaluate",
        "evaluates a checkpoint of a run, on any number of devices",
        (
            "--workdir=runs/digits",
            "--workdir=runs/digits --step=500 --gin_file=strategies/single.gin",
            "--workdir=runs/digits --gin.tfds_data.eval_split=train",
        ),
        "Reads the run's own configuration from its folder. Files and bindings come after it: "
        "another data set or split, another strategy, another batch size.",
        function="evaluate",
        workdir="the folder of a run",
    ),
    "checkpoints": Entry(
        "checkpoints",
        "lists the checkpoints of a run, verifies them, and exports parameters",
        ("runs/digits --verify", "runs/digits --export=digits.safetensors"),
        "Each checkpoint is a line. --verify reads all arrays and compares them with their "
        "checksums; the exit status is 1 if any is damaged.",
        words="workdir",
    ),
    "sample": Entry(
        "sample",
        "continues a prompt by a run's language model, or by a published one",
        ("runs/lm --prompt='def '", "tiny_llama --prompt='def ' --temperature=0"),
        "Without --tokenizer tokens are bytes, or those of tokenizer.json in the folder.",
        words="folder",
    ),
    "launch": Entry(
        "launch",
        "starts one run in several processes of this machine",
        (f"-n 2 -- {_RUN} --cpu_devices=4 --workdir=runs/two", "--post_mortem=runs/two"),
        "FLAGS are those of train. Each process appends to its own log, DIR/logs/process_I.log; "
        "that of process 0 is shown. If a process fails, the others are ended, and a few lines say "
        "which was first, where, and which log to read. Signals are forwarded. The exit status is "
        "that of the process that failed first.",
    ),
    "list": Entry(
        "train",
        "lists what gin files can name: all of it, a group, or one name",
        ("", "strategies", "optax.adamw"),
        function="run",
    ),
}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Leaves at once at SIGINT: an extension that is being imported makes another error of it."""

    def leave(*_: object) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{INTERRUPTION}\n".encode())
        os._exit(INTERRUPTED)

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def flag(parameter: str) -> str:
    """The flag of a parameter: '--gin_file' of 'gin_files'."""
    return f"--{FLAGS.get(parameter, parameter)}"


def lacks(name: str, *, has_files: bool, has_workdir: bool) -> str:
    """What a command needs and was not given, in words; '' if nothing."""
    entry = COMMANDS[name]
    if entry.verb and not has_files:
        example = next(text for text in entry.examples if "--gin_file" in text)
        return f"nothing to {entry.verb}: give --gin_file. E.g. {program(name)} {example}"
    if entry.workdir and not has_workdir:
        return f"--workdir=DIR is required: {entry.workdir}"
    return ""


def program(name: str) -> str:
    """How this process was started: 'research-dp train' or 'python -m research_dp.train'."""
    started = Path(sys.argv[0])
    own_main = Path(research_dp.__file__).with_name("__main__.py")
    is_script = started.stem == "research-dp" or started == own_main
    return f"research-dp {name}" if is_script else f"python -m research_dp.{name}"


def examples(name: str, width: int) -> str:
    """The last part of a command's help text: commands that a shell takes as they stand."""
    texts = [f"{program(name)} {one}" for one in COMMANDS[name].examples]
    return "\n".join(["examples:", *(shell_lines(text, 2, width) for text in texts)])


def shell_lines(text: str, indent: int, width: int) -> str:
    """A command in lines of a width, as a shell takes them."""
    width -= indent + 6
    parts = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return " " * indent + f" \\\n{' ' * (indent + 4)}".join(parts)
