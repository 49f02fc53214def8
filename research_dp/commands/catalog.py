"""Lists what gin files can name: all registered functions and all shipped files, grouped."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import gin
import jax
import optax

from research_dp.argument_checks import members
from research_dp.commands import cli, streams
from research_dp.commands.dry_run import default_text
from research_dp.config import binding_checks, gin_internals, load, parser
from research_dp.data import DataSet
from research_dp.distributed.sharding import ShardDecision
from research_dp.errors import UsageError
from research_dp.runs.files import json_text
from research_dp.strategies import Strategy, StrategyConfig
from research_dp.training.writers import MetricWriter
from research_dp.types import TrainableModel

# Group -> (folders of gin files, modules of functions, result types of functions anywhere).
_GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[type, ...]]] = {
    "runs": (("runs",), ("research_dp.training.train", "initial"), ()),
    "strategies": (
        ("strategies",),
        ("strategies", "distributed"),
        (StrategyConfig, Strategy, jax.sharding.Mesh, ShardDecision),
    ),
    "models": (("models",), ("models",), (TrainableModel,)),
    "data": (("data",), ("data",), (DataSet,)),
    "optimizers": (("optim",), ("optim", "optax"), (optax.GradientTransformation,)),
    "writers": ((), ("writers",), (MetricWriter,)),
    "options": (("precision", "options"), (), ()),
}


def print_list(name: str, imports: Sequence[str], *, as_json: bool) -> int:
    """Prints what gin files can name: all, a group, or one name; returns the exit status."""
    shown: Any = named(name, everything(imports)) if name else everything(imports)
    as_text = in_full if isinstance(shown, dict) and "entries" not in shown else in_lines
    print(json_text(shown) if as_json else as_text(shown))
    return 0


def named(name: str, groups: list[dict[str, Any]]) -> Any:
    """The function or file of a name; the groups, if it is that of a group or of several files.

    A file's name is a part of its path: 'strategies/fsdp.gin', 'fsdp.gin', 'fsdp'.
    """
    entries = [entry for group in groups for entry in group["entries"]]
    stem = name.removeprefix("gin/").removesuffix(".gin")
    files = [e for e in entries if "text" in e and f"/{e['name']}".endswith(f"/{stem}.gin")]
    exact = [e for e in entries if name in (e["name"], e.get("selector"))]
    if same := [group for group in groups if group["group"] == name]:
        return same
    if exact or len(files) == 1:
        return (exact or files)[0]
    if files:
        return [{"group": f"gin files called {name}", "entries": files}]
    hint = binding_checks.did_you_mean(name, [e["name"] for e in entries] + [*_GROUPS])
    hint = hint if "Did you mean" in hint else parser.nearest_file(name)
    raise UsageError(f"--list {name}: there is nothing of this name.{hint}")


def everything(imports: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All groups: [{'group', 'entries': [{'name', 'summary', ...}]}]; `imports` register more."""
    load.register_all()
    for name in imports:
        try:
            importlib.import_module(name)
        except Exception as error:  # a user's module may raise anything
            raise UsageError(f"--import={name}: {type(error).__name__}: {error}.") from error
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in _GROUPS}
    for file in parser.shipped():
        folder = file.split("/")[0]
        group = next((g for g, (folders, *_) in _GROUPS.items() if folder in folders), folder)
        groups.setdefault(group, []).append(_file_entry(file))
    known = gin_internals.configurables().values()
    functions = (entry for entry in known if not entry.selector.startswith("python_objects."))
    for entry in sorted(functions, key=lambda entry: _position(inspect.unwrap(entry.function))):
        groups.setdefault(_group(entry), []).append(_function_entry(entry))
    return [{"group": name, "entries": entries} for name, entries in groups.items() if entries]


def in_lines(groups: Iterable[dict[str, Any]]) -> str:
    """One line for each entry, below the name of its group; on a terminal as many as it needs."""
    lines = []
    columns = streams.width() if sys.stdout.isatty() else sys.maxsize
    for group in groups:
        lines += ["", group["group"]]
        width = max(len(entry["name"]) for entry in group["entries"])
        for entry in group["entries"]:
            line = f"  {entry['name']:<{width}}  {entry['summary']}"
            further = " " * (width + 4)
            lines += textwrap.wrap(
                line,
                columns,
                subsequent_indent=further,
                break_on_hyphens=False,
                break_long_words=False,
            )
    return "\n".join(lines[1:])


def in_full(entry: dict[str, Any]) -> str:
    """A function's signature, docstring, place and files; or a gin file's text."""
    if "text" in entry:
        return f"# {entry['file']}\n{entry['text']}".rstrip()
    signature = f"{entry['name']}("
    for name, known in entry["parameters"].items():
        default = f" = {known['default']}" if known["default"] is not None else ""
        signature += f"\n    {name}: {known['type']}{default},"
        notes = filter(None, ["required" if known["required"] else "", known["expected"]])
        signature += f"  # {text}" if (text := "; ".join(notes)) else ""
    signature += f"\n) -> {entry['returns']}"
    bound = [f"  {file}" for file in entry["bound_in"]] or ["  none"]
    parts = [signature, entry["doc"], f"In {entry['file']}", "\n".join(["Bound in", *bound])]
    return "\n\n".join(part for part in parts if part)


def _group(entry: gin_internals.Configurable) -> str:
    module = entry.selector.rpartition(".")[0]
    returned = binding_checks.annotation(entry.function, "return")
    for name, (_, modules, result_types) in _GROUPS.items():
        if module in modules or returned in result_types:
            return name
    return module.split(".")[0]  # a user's package


def _function_entry(entry: gin_internals.Configurable) -> dict[str, Any]:
    code = inspect.unwrap(entry.function)
    doc = inspect.getdoc(code) or ""
    about, passed = cli.descriptions(doc), entry.passed
    return {
        "name": entry.name,
        "selector": entry.selector,
        "summary": " ".join(doc.split("\n\n")[0].split()),
        "parameters": {
            name: {
                **_parameter(code, parameter),
                "bindable": name not in passed,
                "description": about.get(name),
            }
            for name, parameter in entry.parameters.items()
        },
        "returns": _type_text(inspect.signature(entry.function).return_annotation),
        "doc": doc,
        "file": _file_of(code),
        "bound_in": _bound_in().get(entry.selector, []),
    }


def _file_entry(file: str) -> dict[str, Any]:
    """Its summary is the first sentence of the first comment."""
    path = parser.find(file)
    text = path.read_text() if path else ""
    comment = list(itertools.takewhile(lambda line: line.startswith("# "), text.splitlines()))
    summary = " ".join(line[2:] for line in comment)
    if len(comment) != 1 or not summary.endswith("."):
        summary = summary.partition(". ")[0] + "."
    return {"name": file, "summary": summary, "file": str(path), "text": text}


def _parameter(code: Any, parameter: inspect.Parameter) -> dict[str, Any]:
    """A parameter's type, default, and `expected` where the type's name does not say it."""
    has_default = parameter.default is not gin.REQUIRED and parameter.default is not parameter.empty
    expected = binding_checks.annotation(code, parameter.name)
    is_special = any(typing.get_origin(part) in (Annotated, Literal) for part in members(expected))
    return {
        "type": _type_text(parameter.annotation),
        "default": default_text(parameter.default) if has_default else None,
        "required": parameter.default is gin.REQUIRED,
        "expected": binding_checks.in_words(expected) if is_special else None,
    }


def _type_text(written: Any) -> str:
    if written is inspect.Parameter.empty:
        return "Any"
    text = written if isinstance(written, str) else inspect.formatannotation(written)
    text = text.replace(inspect.formatannotation(jax.typing.ArrayLike), "ArrayLike")
    return re.sub(r"\b(?:[a-z_0-9]+\.)+(?=[A-Za-z])", "", text)


def _position(code: Any) -> tuple[str, int]:
    """Module and line, which do not depend on the order of imports; 0 if there is no source."""
    try:
        return code.__module__, inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return code.__module__, 0


def _file_of(code: Any) -> str:
    """File and line, relative to the folder that contains the package or module."""
    module, line = _position(code)
    if not line:
        return module
    file = Path(inspect.getsourcefile(code) or "")
    return f"{Path(*file.parts[-len(module.split('.')) :])}:{line}"


@functools.cache
def _bound_in() -> dict[str, list[str]]:
    """Full name of a function -> the shipped files that bind it, not by way of an include."""
    bound_in: dict[str, list[str]] = {}
    for file in parser.shipped():
        for item in parser.read([file], []):
            if isinstance(item, parser.Binding) and len(item.files) == 1:
                files = bound_in.setdefault(item.key[1], [])
                files.extend({file} - set(files))
    return bound_in
