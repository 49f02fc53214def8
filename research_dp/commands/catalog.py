"""Lists what gin files can name: all registered functions and all shipped files, grouped."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import gin
import jax
import optax

from research_dp.argument_checks import members
from research_dp.commands.dry_run import default_text
from research_dp.config import gin_internals, load, parser
from research_dp.config.binding_checks import annotation, did_you_mean, in_words
from research_dp.config.parser import Binding
from research_dp.data import DataSet
from research_dp.distributed.shard_rules import ShardDecision
from research_dp.errors import UsageError
from research_dp.strategies import Strategy, StrategyConfig
from research_dp.types import TrainableModel

# Group -> (folders of gin files, modules of functions, result types of functions anywhere).
_GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[type, ...]]] = {
    "runs": (("runs",), ("research_dp.training.loop",), ()),
    "strategies": (
        ("strategies",),
        ("strategies",),
        (StrategyConfig, Strategy, jax.sharding.Mesh, ShardDecision),
    ),
    "models": (("models",), ("models",), (TrainableModel,)),
    "data": (("data",), ("data",), (DataSet,)),
    "optimizers": (("optim",), ("optim", "optax"), (optax.GradientTransformation,)),
    "options": (("precision", "options"), (), ()),
    "functions for code of your own": ((), ("distributed",), ()),
}


def print_list(name: str, imports: tuple[str, ...], *, as_json: bool) -> int:
    """Prints what gin files can name: all, or one function or file; returns the exit status.

    Args:
        name: '' for all.
        imports: Modules that register more.
        as_json: Whether to print JSON.

    Raises:
        UsageError: Nothing has this name.
    """
    groups = everything(imports)
    if not name:
        print(json.dumps(groups, indent=2) if as_json else as_text(groups))
        return 0
    entries = [entry for group in groups for entry in group["entries"]]
    named = [entry for entry in entries if name in (entry["name"], entry.get("selector"))]
    if not named:
        hint = did_you_mean(name, [entry["name"] for entry in entries])
        raise UsageError(f"--list {name}: there is nothing of this name.{hint}")
    print(json.dumps(named[0], indent=2) if as_json else in_full(named[0]))
    return 0


def everything(imports: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All groups: [{'group', 'entries': [{'name', 'summary', ...}]}].

    Args:
        imports: Modules that register more.

    Raises:
        UsageError: One of them cannot be imported.
    """
    load.register_all()
    for name in imports:
        try:
            importlib.import_module(name)
        except Exception as error:  # a user's module may raise anything
            raise UsageError(f"--import={name}: {type(error).__name__}: {error}.") from error
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in _GROUPS}
    for file in parser.shipped():
        folder = file.split("/")[1]
        group = next((g for g, (folders, *_) in _GROUPS.items() if folder in folders), folder)
        groups.setdefault(group, []).append(_file_entry(file))
    for entry in sorted(gin_internals.configurables().values(), key=_position):
        groups.setdefault(_group(entry), []).append(_function_entry(entry))
    return [{"group": name, "entries": entries} for name, entries in groups.items() if entries]


def as_text(groups: Iterable[dict[str, Any]]) -> str:
    """One line for each entry, below the name of its group."""
    lines = []
    for group in groups:
        lines += ["", group["group"]]
        width = max(len(entry["name"]) for entry in group["entries"])
        lines += [f"  {e['name']:<{width}}  {e['summary']}".rstrip() for e in group["entries"]]
    return "\n".join(lines[1:])


def in_full(entry: dict[str, Any]) -> str:
    """A function's signature, docstring, place and files; or a gin file's text."""
    if "text" in entry:
        return f"# {entry['file']}\n{entry['text']}".rstrip()
    parameters = [_parameter_line(name, known) for name, known in entry["parameters"].items()]
    signature = "\n".join([f"{entry['name']}(", *parameters, f") -> {entry['returns']}"])
    bound = [f"  {file}" for file in entry["bound_in"]] or ["  none"]
    parts = [signature, entry["doc"], f"In {entry['file']}", "\n".join(["Bound in", *bound])]
    return "\n\n".join(part for part in parts if part)


def _group(entry: gin_internals.Configurable) -> str:
    module = entry.selector.rpartition(".")[0]
    returned = annotation(entry.function, "return")
    for name, (_, modules, result_types) in _GROUPS.items():
        if module in modules or returned in result_types:
            return name
    return module.split(".")[0]  # a user's package


def _function_entry(entry: gin_internals.Configurable) -> dict[str, Any]:
    code = inspect.unwrap(entry.function)
    doc = inspect.getdoc(code) or ""
    return {
        "name": entry.name,
        "selector": entry.selector,
        "summary": " ".join(doc.split("\n\n")[0].split()),
        "parameters": {name: _parameter(code, p) for name, p in entry.parameters.items()},
        "returns": _type_text(inspect.signature(entry.function).return_annotation),
        "doc": doc,
        "file": _file_of(code),
        "bound_in": _bound_in().get(entry.selector, []),
    }


def _file_entry(file: str) -> dict[str, Any]:
    path = parser.find(file)
    text = path.read_text() if path else ""
    return {"name": file, "summary": _first_sentence(text), "file": str(path), "text": text}


def _first_sentence(text: str) -> str:
    """The first sentence of a file's first comment."""
    comment = list(itertools.takewhile(lambda line: line.startswith("# "), text.splitlines()))
    joined = " ".join(line[2:] for line in comment)
    return joined if joined.endswith(".") and len(comment) == 1 else joined.partition(". ")[0] + "."


def _parameter(code: Any, parameter: inspect.Parameter) -> dict[str, Any]:
    """A parameter's type, default, and `expected` where the type's name does not say it."""
    has_default = parameter.default is not gin.REQUIRED and parameter.default is not parameter.empty
    expected = annotation(code, parameter.name)
    is_special = any(typing.get_origin(part) in (Annotated, Literal) for part in members(expected))
    return {
        "type": _type_text(parameter.annotation),
        "default": default_text(parameter.default) if has_default else None,
        "required": parameter.default is gin.REQUIRED,
        "expected": in_words(expected) if is_special else None,
    }


def _parameter_line(name: str, known: dict[str, Any]) -> str:
    """A parameter's line of a signature."""
    default = f" = {known['default']}" if known["default"] is not None else ""
    notes = "; ".join(filter(None, ["required" if known["required"] else "", known["expected"]]))
    return f"    {name}: {known['type']}{default}," + (f"  # {notes}" if notes else "")


def _type_text(written: Any) -> str:
    if written is inspect.Parameter.empty:
        return "Any"
    text = written if isinstance(written, str) else inspect.formatannotation(written)
    text = text.replace(inspect.formatannotation(jax.typing.ArrayLike), "ArrayLike")
    return re.sub(r"\b(?:[a-z_0-9]+\.)+(?=[A-Za-z])", "", text)


def _position(entry: gin_internals.Configurable) -> tuple[str, int]:
    """Module and line, which do not depend on the order of imports."""
    code = inspect.unwrap(entry.function)
    return code.__module__, _line_of(code)


def _line_of(code: Any) -> int:
    """Where its source begins; 0 if it has none."""
    try:
        return inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return 0


def _file_of(code: Any) -> str:
    """File and line, relative to the folder that contains the package or module."""
    if not (line := _line_of(code)):
        return code.__module__
    file = Path(inspect.getsourcefile(code) or "")
    return f"{Path(*file.parts[-len(code.__module__.split('.')) :])}:{line}"


@functools.cache
def _bound_in() -> dict[str, list[str]]:
    """Full name of a function -> the shipped files that bind it, not by way of an include."""
    bound_in: dict[str, list[str]] = {}
    for file in parser.shipped():
        for item in parser.read([file], []):
            if isinstance(item, Binding) and len(item.files) == 1:
                files = bound_in.setdefault(item.key[1], [])
                files.extend({file} - set(files))
    return bound_in
