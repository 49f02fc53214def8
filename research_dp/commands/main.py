"""The command `research-dp`: says what there is, and starts a command.

It imports little: a command's module is imported once it is known which one is meant.
"""

from __future__ import annotations

import difflib
import faulthandler
import importlib
import importlib.metadata
import platform
import sys
import textwrap
from collections.abc import Callable, Sequence

import research_dp
from research_dp.commands import cli, entries, streams


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the process's own; returns the exit status."""
    if argv is None:
        _report_aborts()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    with streams.usable():
        if name == "help" and rest:  # `research-dp help train`
            name, *rest = rest[0], "--help"
        if name in ("--help", "-h", "help"):
            print(overview())
            return 0
        if name in ("--version", "-V", "version"):
            print(version())
            return 0
        if [*name.split("="), *rest] == ["--completion", "bash"]:
            from research_dp.commands import completion

            print(completion.script())
            return 0
        if name not in entries.COMMANDS:
            print(f"error: {_unknown(name)}", file=sys.stderr)
            return 2
    return main_of(name)(rest)


def main_of(name: str) -> Callable[[list[str]], int]:
    """The `main` of a command, which gets the words after the command's name.

    Its imports take long. An interrupt meanwhile is one line, as it is later.
    """
    module = f"research_dp.commands.{entries.COMMANDS[name].module}"

    @streams.usable()
    def main(argv: list[str]) -> int:
        words = ["--list", *argv] if name == "list" else argv
        if name == "launch":
            with entries.interruptible():
                launch = importlib.import_module(module)
            return launch.main(words)
        try:
            with streams.dispensable(but_results=True):
                arguments = cli.parse(name, words)
        except streams.Unwritten as error:
            return error.report()
        with entries.interruptible():
            failures = importlib.import_module("research_dp.commands.failures")
        return failures.run_command(lambda: importlib.import_module(module).command(**arguments))

    return main


def doorway(name: str, command: str) -> Callable[[list[str]], int]:
    """The `main` of a command, for the module of this `__name__`, which may be the program.

    An imported module becomes an attribute of its package, and would hide e.g. the function
    `research_dp.plan`. So the function takes the module's place, with its `main` and its spec.
    """
    main = main_of(command)
    if name == "__main__":
        _report_aborts()
        sys.exit(main(sys.argv[1:]))
    if name == f"research_dp.{command}" and command in research_dp.__all__:
        function = research_dp.__getattr__(command)
        function.main, function.__spec__ = main, sys.modules[name].__spec__
        sys.modules[name] = function
    return main


def _report_aborts() -> None:
    """Has Python's stacks printed, too, where a library aborts this process."""
    streams.repair()  # the fault handler needs a standard error
    faulthandler.enable()


def overview() -> str:
    """All commands, with what each does and an example."""
    width = streams.width()
    lines = ["Data-parallel training in JAX, the strategy chosen by a gin file.", ""]
    for name, entry in entries.COMMANDS.items():
        lines += textwrap.wrap(f"{name:<12}{entry.summary}", width, subsequent_indent=" " * 12)
        lines.append(entries.shell_lines(f"research-dp {name} {entry.examples[0]}", 12, width))
    end = (
        "`research-dp COMMAND --help` has a command's flags and more examples. "
        "`python -m research_dp.COMMAND` is the same command. `research-dp --version` says what "
        "is installed."
    )
    return "\n".join([*lines, "", *textwrap.wrap(end, width)])


def version() -> str:
    """Versions of this package and of those that decide about a run's results."""
    names = ("jax", "jaxlib", "flax", "optax")
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return (
        f"research-dp {research_dp.__version__} ({libraries}, Python {platform.python_version()})"
    )


def _unknown(name: str) -> str:
    if name.startswith("--completion"):
        return "--completion is for bash: source <(research-dp --completion bash)"
    if name.startswith("-"):
        return f"give a command first: research-dp train {name} (--help shows all commands)"
    near = difflib.get_close_matches(name, entries.COMMANDS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else f" There are {', '.join(entries.COMMANDS)}."
    return f"there is no command {name!r}.{hint}"
