"""Parses the flags of the commands."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from research_dp.commands.flag_values import expand_bindings, take_varied
from research_dp.commands.processes import Processes
from research_dp.errors import UsageError

_EXAMPLE = "--gin_file=gin/runs/digits.gin"


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of all commands but those of `plan` alone; `_parser` and `parse` explain them.

    `list` is None without --list, and '' for a list of everything.
    """

    gin_files: tuple[str, ...]
    bindings: tuple[str, ...]
    workdir: str | None = None
    cpu_devices: int | None = None
    dry_run: bool = False
    imports: tuple[str, ...] = ()
    allow_unused: bool = False
    list: str | None = None
    json: bool = False
    processes: Processes = dataclasses.field(default_factory=Processes)
    against: str = "single"
    steps: int = 30
    quick: bool = False
    json_file: str | None = None


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The further flags of `plan`; `parse_plan` explains them."""

    topology: str
    strategies: tuple[str, ...] = ()
    json_file: str | None = None
    html_file: str | None = None
    dump_hlo: str | None = None
    advise: bool = False
    measure: bool = False


def parse(argv: Sequence[str], description: str) -> Options:
    """Parses the flags of `train`; exits with status 2 and one line if they are wrong."""
    parser = _parser("research_dp.train", description)
    add = parser.add_argument
    add("--dry_run", action="store_true", help="check and show the configuration; train nothing")
    add(
        "--list",
        nargs="?",
        const="",
        metavar="NAME",
        help="show all that gin files can name, or one of it; train nothing",
    )
    add("--json", action="store_true", help="with --list: as JSON")
    add(
        "--coordinator",
        metavar="HOST:PORT|auto",
        help="one run of several processes: where process 0 listens; auto: ask the cluster",
    )
    add("--num_processes", type=_positive, metavar="N", help="how many processes there are")
    add("--process_id", type=_not_negative, metavar="I", help="which one this is, from 0")
    add(
        "--heartbeat_seconds",
        type=_positive,
        default=Processes.heartbeat_seconds,
        metavar="S",
        help="a process that was not heard of for so long ends the others (100)",
    )
    parsed = parser.parse_args(expand_bindings(argv))
    if parsed.list is None:
        if parsed.json:
            parser.error("--json goes with --list: --list --json, or --list=NAME --json")
        _require_workdir(parser, parsed)
    elif parsed.gin_files or parsed.bindings:
        parser.error("--list shows what there is, not a run: leave out gin files and bindings")
    return _options(parsed)


def parse_sweep(argv: Sequence[str], description: str) -> tuple[Options, list[tuple[str, str]]]:
    """Parses the flags of `sweep`.

    Returns:
        The options, and what is varied, in order: (name of a parameter, its values), or
        ('', names of files).
    """
    parser = _parser("research_dp.sweep", description)
    add = parser.add_argument
    add("--dry_run", action="store_true", help="check and show all runs; train nothing")
    add(
        "--vary_file",
        action="append",
        metavar="F,G,...",
        help="files of which each run adds one; nothing before or after a comma: none; repeatable",
    )
    add("--vary.NAME", metavar="V,W,...", help="values of a parameter: --vary.train.seed=0,1,2")
    arguments, varied = take_varied(expand_bindings(argv))
    parsed = parser.parse_args(arguments)
    for name, text in varied:
        if not text:
            parser.error(f"{f'--vary.{name}' if name else '--vary_file'}: give values, V,W,...")
    _require_workdir(parser, parsed)
    return _options(parsed), varied


def parse_plan(argv: Sequence[str], description: str) -> tuple[Options, PlanOptions]:
    """Parses the flags of `plan`."""
    parser = _parser("research_dp.plan", description, has_results=False)
    add = parser.add_argument
    add("--topology", required=True, metavar="T", help="h100:8x8, v5e-64, cpu:8, ...; or: here")
    add(
        "--strategies",
        default="",
        metavar="all|A,B,...",
        help="shipped strategies, or files, to compare; +F after one adds a file: "
        "fsdp+h100_speed; without this flag the run's own",
    )
    add("--json", dest="json_file", metavar="FILE", help="write the plan as JSON")
    add("--html", dest="html_file", metavar="FILE", help="write a page: plots by devices, tables")
    add("--dump_hlo", metavar="DIR", help="write each compiled program's text")
    add("--advise", action="store_true", help="compile other options and batches of the fastest")
    add("--measure", action="store_true", help="run each step, too, if the devices are present")
    parsed = _parse_files(parser, argv, "plan", _EXAMPLE)
    options = _options(parsed)
    parsed.strategies = tuple(filter(None, map(str.strip, parsed.strategies.split(","))))
    return options, PlanOptions(**_fields_of(PlanOptions, vars(parsed)))


def parse_certify(argv: Sequence[str], description: str) -> Options:
    """Parses the flags of `certify`."""
    parser = _parser("research_dp.certify", description, has_results=False)
    add = parser.add_argument
    add("--against", default="single", metavar="S", help="the oracle: a strategy, or its gin file")
    add("--steps", type=_positive, default=30, metavar="N", help="steps that are compared")
    add("--json", dest="json_file", metavar="FILE", help="writes all that was found there")
    add("--quick", action="store_true", help="a strategy's file alone, on a small built-in run")
    parsed = _parse_files(parser, argv, "certify", _EXAMPLE)
    if parsed.quick and (parsed.against, parsed.steps) != (Options.against, Options.steps):
        parser.error("--quick has its own oracle and steps: leave out --against and --steps")
    return _options(parsed)


def check_writable(flag: str, file: str | None) -> None:
    """Raises UsageError if a file cannot be written, before hours of work would be lost."""
    if file is not None:
        try:
            open(file, "a").close()
        except OSError as error:
            raise UsageError(f"{flag}={file} cannot be written: {error.strerror}.") from error


def _parser(module: str, description: str, *, has_results: bool = True) -> _Parser:
    """The flags of all commands that run gin files; with --workdir if there are results."""
    parser = _Parser(prog=f"python -m {module}", description=description, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--gin_file",
        dest="gin_files",
        action="append",
        default=[],
        metavar="F",
        help="later files win; repeatable; shipped ones are found as runs/digits.gin",
    )
    add(
        "--gin_bindings",
        dest="bindings",
        action="append",
        default=[],
        metavar="'NAME = VALUE'",
        help="a binding that wins over files; repeatable",
    )
    add(
        "--gin.NAME",
        dest="_",
        metavar="VALUE",
        help="the same, shorter: --gin.train.num_steps=20; a bare word is a string",
    )
    if has_results:
        add("--workdir", metavar="DIR", help="where results go, and from where a run continues")
    add("--cpu_devices", type=_positive, metavar="N", help="split the CPU into N devices")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module of yours that registers functions with gin; repeatable",
    )
    add("--allow_unused", action="store_true", help="accept bindings without effect")
    return parser


def _parse_files(
    parser: _Parser, argv: Sequence[str], verb: str, example: str
) -> argparse.Namespace:
    parsed = parser.parse_args(expand_bindings(argv))
    _require_files(parser, parsed, verb, example)
    return parsed


def _require_files(parser: _Parser, parsed: argparse.Namespace, verb: str, example: str) -> None:
    if not parsed.gin_files and not parsed.bindings:
        parser.error(f"nothing to {verb}: give --gin_file, e.g. {example}")


def _require_workdir(parser: _Parser, parsed: argparse.Namespace) -> None:
    _require_files(parser, parsed, "run", _EXAMPLE)
    if not parsed.workdir and not parsed.dry_run:
        parser.error("--workdir=DIR is required: results and checkpoints go there")


def _options(parsed: argparse.Namespace) -> Options:
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in vars(parsed).items()}
    processes = Processes(**_fields_of(Processes, given))
    return Options(**_fields_of(Options, given), processes=processes)


def _fields_of(dataclass: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(dataclass)}
    return {name: value for name, value in given.items() if name in known}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; --help shows the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows all flags)\n")
