"""The command line: the flags of a command are the parameters of its functions.

A command is a module with a function `command`. Its parameters are flags, and so are those of the
public function that gets its `**options`; their docstrings are the help texts. Both are read from
the source, without importing it, so that help and mistakes in flags are quick.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import docstring_parser

from research_dp.commands import entries, streams
from research_dp.config import spellings
from research_dp.errors import UsageError

_BARE_WORD = re.compile(r"^([A-Za-z_]|~|\.{0,2}/)[\w./+~:%\[\]-]*$")
_LITERALS = {"None", "True", "False"}
# What stands for a value in help texts, where its type does not say it.
_METAVARS = {
    "gin_files": "F",
    "imports": "MODULE",
    "runs": "RUN",
    "workdir": "DIR",
    "dump_hlo": "DIR",
    "json_file": "FILE",
    "html_file": "FILE",
    "export": "FILE",
    "strategies": "A,B,...|all",
    "topology": "T",
    "against": "S",
    "list": "NAME",
    "coordinator": "HOST:PORT|auto",
    "process_id": "I",
    "heartbeat_seconds": "S",
}
# The same for all commands on gin files, whose functions take them in other forms.
_HELP = {
    "gin_files": "Later files win; repeatable. Shipped ones are found as runs/digits.gin.",
    "bindings": "A binding that wins over files; repeatable.",
    "cpu_devices": "Split the CPU into N devices.",
    "imports": "A module of yours that registers functions with gin; repeatable.",
    "allow_unused": "Accept bindings without effect.",
}
_OBJECTS = ("model", "data", "optimizer", "initial")  # parameters that are no flags
# Help on flags that share a parameter with another.
_BINDING = "The same, shorter: --gin.train.num_steps=20. A bare word is a string."
_VARY_FILE = "Files of which each run adds one; nothing before or after a comma: none. Repeatable."
_VARY = "Values of a parameter: --vary.train.seed=0,1,2."


class Parameter(NamedTuple):
    """A parameter as a function's source declares it."""

    name: str
    type: str  # as it is written
    default: str | None  # as it is written; None: it has none
    help: str


def descriptions(doc: str) -> dict[str, str]:
    """What a docstring says about each parameter, each in one line; {} if it cannot be read."""
    try:
        parameters = docstring_parser.parse(doc, docstring_parser.DocstringStyle.GOOGLE).params
    except docstring_parser.ParseError:  # e.g. of a user's `Args:` without any
        return {}
    return {
        name.strip(" *"): " ".join((parameter.description or "").split())
        for parameter in parameters
        for name in parameter.arg_name.split(",")
    }


def parameters(name: str) -> dict[str, Parameter]:
    """The parameters of a command by name: those on gin files, then its function's, then its own.

    Where both declare one, that of `command` counts.
    """
    entry = entries.COMMANDS[name]
    file = Path(__file__).with_name(f"{entry.module}.py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, Parameter] = {}
    for function in filter(None, (entry.function, "command")):
        declared = {parameter.name: parameter for parameter in _declared(functions[function])}
        found |= {name: one for name, one in declared.items() if name not in _OBJECTS}
    order = ["gin_files", "bindings", "workdir", "cpu_devices", "imports", "allow_unused"]
    first = [known for known in order if known in found]
    return {known: found[known] for known in dict.fromkeys([*first, *found])}


def _declared(function: ast.FunctionDef) -> Iterator[Parameter]:
    texts, arguments = descriptions(ast.get_docstring(function) or ""), function.args
    free = [None] * (len(arguments.args) - len(arguments.defaults))
    defaults = [*free, *arguments.defaults, *arguments.kw_defaults]
    for one, default in zip([*arguments.args, *arguments.kwonlyargs], defaults, strict=True):
        written = ast.unparse(one.annotation) if one.annotation else ""
        value = None if default is None else ast.unparse(default)
        yield Parameter(one.arg, written, value, _HELP.get(one.arg) or texts.get(one.arg, ""))


def parser_of(name: str) -> Parser:
    """The parser of a command's flags."""
    parser = Parser(name)
    for parameter in parameters(name).values():
        for words, settings in _flags(parameter, entries.COMMANDS[name].words):
            parser.add_argument(*words, **settings)
    return parser


def parse(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """The arguments of a command's function by flags; exits with status 2 and one line if wrong."""
    parser = parser_of(name)
    varies = "--vary.NAME" in parser._option_string_actions
    given = vars(parser.parse_args(_rewritten(argv, varies=varies)))
    if "list" in given:  # not a run, but what there is
        return given
    if name == "train" and "json" in given:
        parser.error("--json goes with --list: --list --json, or --list=NAME --json")
    has_files = bool(given.get("gin_files") or given.get("bindings"))
    has_workdir = bool(given.get("workdir") or given.get("dry_run"))
    problem = entries.lacks(name, has_files=has_files, has_workdir=has_workdir)
    if problem and not entries.COMMANDS[name].words:  # `compare` knows what its words make needless
        parser.error(problem)
    return given


def _flags(of: Parameter, words: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """What `add_argument` gets for a parameter; one may have two flags."""
    text = re.sub(r"`(\w+)`", lambda name: entries.flag(name[1]), of.help).replace("%", "%%")
    text, settings = text.replace("None: ", "without it "), dict[str, Any](dest=of.name)
    if of.default not in (None, "None", "False", "()", "''"):
        text += f" (default: {ast.literal_eval(of.default or '')})"
    flag, settings["help"] = entries.flag(of.name), text
    if of.name == words:
        several = {"nargs": "*", **_value(of)} if "Sequence" in of.type else {}
        yield [of.name], {"help": text, **several}
    elif of.name == "vary":
        files, values = (lambda names: ("", names)), (lambda text: tuple(text.split(" = ", 1)))
        settings["action"] = "append"
        yield ["--vary_file"], settings | _shown("F,G,...", _VARY_FILE) | {"type": files}
        yield ["--vary.NAME"], settings | _shown("V,W,...", _VARY) | {"type": values}
    elif of.name == "bindings":
        settings["action"] = "append"
        yield [flag], settings | _shown("'NAME = VALUE'", text)
        yield ["--gin.NAME"], settings | _shown("VALUE", _BINDING)
    elif of.name in ("gin_files", "imports"):
        yield [flag], settings | {"action": "append"} | _value(of)
    elif of.type == "bool":
        yield [flag], settings | {"action": "store_true"}
    elif of.name == "list":
        yield [flag], settings | {"nargs": "?", "const": ""} | _value(of)
    else:
        yield (
            [flag],
            settings | {"required": of.default is None and of.name != "workdir"} | _value(of),
        )


def _shown(metavar: str, text: str) -> dict[str, str]:
    return {"metavar": metavar, "help": text}


def _value(of: Parameter) -> dict[str, Any]:
    """How a parameter's value is read, and what stands for it in help texts."""
    read: Callable[[str], Any] = str
    if "Count" in of.type or of.type == "int":
        read = functools.partial(whole_number, least=0 if "OrZero" in of.type else 1)
        read = _each(read) if "Sequence" in of.type else read
    metavar = "N,M,..." if "Sequence[Count]" in of.type else "TEXT" if read is str else "N"
    return {"type": read, "metavar": _METAVARS.get(of.name, metavar)}


def _each(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(part.strip()) for part in text.split(",")]


def whole_number(text: str, least: int = 1) -> int:
    """Reads a flag's value."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


class Parser(argparse.ArgumentParser):
    """The parser of a command: its help ends with examples, a mistake is one line with a hint."""

    def __init__(self, name: str, **settings: Any):
        width = streams.width()
        entry = entries.COMMANDS[name]
        about = " ".join([f"{entry.summary[:1].upper()}{entry.summary[1:]}.", entry.details])
        super().__init__(
            prog=entries.program(name),
            description=textwrap.fill(about, width - 2),
            epilog=entries.examples(name, width),
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter, width=width - 2
            ),
            allow_abbrev=False,
            **{"argument_default": argparse.SUPPRESS, **settings},
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what is no flag with the nearest one."""
        namespace, words = self.parse_known_args(args, namespace)
        if words:  # `--steps 500` is one
            joined = re.sub(r"(^|\0)(--[^=\0]+)\0(?!-)", r"\1\2=", "\0".join(words))
            first, *more = map(self._hint, joined.split("\0"))
            self.error(" ".join([first, *(hint[:1].upper() + hint[1:] for hint in more)]))
        return namespace

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows all flags)\n")

    def _hint(self, word: str) -> str:
        if not word.startswith("-"):
            is_file = word.endswith(".gin")
            hint = f" Did you mean --gin_file={word}?" if is_file else ""
            return f"{word!r} belongs to no flag.{hint}"
        flags = {flag for flag in self._option_string_actions if "." not in flag}
        name, equals, value = word.partition("=")
        takes_gin = "--gin.NAME" in self._option_string_actions
        is_near = name == "--strategy" and "--strategies" in flags
        if takes_gin and not is_near and (advice := spellings.advice(name, value)):
            return f"there is no flag {name}. {advice}"
        if spellings.plain(name) in ("config", "ginconfig", "ginfiles", "configfile"):
            name = "--gin_file"
        by_plain = {spellings.plain(flag): flag for flag in flags}
        near = difflib.get_close_matches(spellings.plain(name), by_plain, n=1, cutoff=0.7)
        hint = f" Did you mean {by_plain[near[0]]}{equals}{value}?" if near else ""
        return f"there is no flag {word.partition('=')[0]}.{hint}"


def elements(text: str) -> list[str]:
    """The values in 'V,W,...' or '[V, W]', each as a gin file writes it.

    Raises:
        UsageError: A value is missing.
    """
    parts = _split(text)
    if len(parts) == 1 and text[:1] == "[" and text[-1:] == "]":
        parts = _split(text[1:-1])
    if "" in parts:
        raise UsageError(f"{text!r}: a value before or after a comma is missing.")
    return [_as_gin(part) for part in parts]


def _rewritten(argv: Sequence[str], *, varies: bool) -> list[str]:
    """Rewrites `--gin.NAME=VALUE` (or `--gin.NAME VALUE`) to `--gin.NAME=NAME = VALUE`."""
    rest, result = list(argv), []
    flags = r"--(gin\.|vary\.|vary_file$)" if varies else r"--gin\."
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if match := re.match(flags, name):
            if not equals and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            value = _as_gin(value) if match[0] == "--gin." else value
            parameter = f"NAME={name[match.end() :]} = " if match[0].endswith(".") else "="
            argument = f"{match[0]}{parameter}{value}"
        result.append(argument)
    return result


def _as_gin(value: str) -> str:
    """A bare word (bfloat16), a path or a split (train[:90%]) is a string; gin reads all else."""
    is_bare = _BARE_WORD.match(value) and value not in _LITERALS
    return repr(value) if is_bare else value


def _split(text: str) -> list[str]:
    """Splits at commas, except within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
