"""What gin files can name: all registered functions and all shipped files, grouped."""

from __future__ import annotations

import functools
import importlib
import inspect
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
from research_dp.config.name_checks import did_you_mean
from research_dp.config.parser import Binding
from research_dp.config.reachability import key
from research_dp.config.typecheck import annotation, in_words
from research_dp.data import DataSet
from research_dp.distributed.shard_rules import ShardDecision
from research_dp.errors import UsageError
from research_dp.strategies import Strategy, StrategyConfig
from research_dp.types import TrainableModel

# Group -> (folders of gin files, modules of functions, what functions of any module return).
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
        except Exception as error:  # a module of the user's own, with whatever is wrong in it
            raise UsageError(f"--import={name}: {type(error).__name__}: {error}.") from error
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in _GROUPS}
    for file in parser.shipped():
        folder = file.split("/")[1]
        group = next((g for g, (folders, *_) in _GROUPS.items() if folder in folders), folder)
        groups.setdefault(group, []).append(_file_entry(file))
    for entry in sorted(gin_internals.configurables().values(), key=_place):
        groups.setdefault(_group(entry), []).append(_function_entry(entry))
    return [{"group": name, "entries": entries} for name, entries in groups.items() if entries]


def as_text(groups: Iterable[dict[str, Any]]) -> str:
    """One line an entry, below the name of its group."""
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
    parameters = [_parameter_line(name, entry) for name in entry["parameters"]]
    signature = "\n".join([f"{entry['name']}(", *parameters, f") -> {entry['returns']}"])
    bound = [f"  {file}" for file in entry["bound_in"]] or ["  none"]
    parts = [signature, entry["doc"], f"In {entry['file']}", "\n".join(["Bound in", *bound])]
    return "\n\n".join(part for part in parts if part)


def _group(entry: gin_internals.Configurable) -> str:
    module = entry.selector.rpartition(".")[0]
    returned = annotation(entry.function, "return")
    for name, (_, modules, kinds) in _GROUPS.items():
        if module in modules or returned in kinds:
            return name
    return module.split(".")[0]  # a package of the user's own


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
    return {"name": file, "summary": parser.first_comment(file), "file": str(path), "text": text}


def _parameter(code: Any, parameter: inspect.Parameter) -> dict[str, Any]:
    """What is known of a parameter; `expected` where its type alone does not say it."""
    has_default = parameter.default is not gin.REQUIRED and parameter.default is not parameter.empty
    kind = annotation(code, parameter.name)
    told = any(typing.get_origin(part) in (Annotated, Literal) for part in members(kind))
    return {
        "type": _type_text(parameter.annotation),
        "default": default_text(parameter.default) if has_default else None,
        "required": parameter.default is gin.REQUIRED,
        "expected": in_words(kind) if told else None,
    }


def _parameter_line(name: str, entry: dict[str, Any]) -> str:
    """A parameter's line of a signature."""
    known = entry["parameters"][name]
    text = f"    {name}: {known['type']}"
    text += f" = {known['default']}," if known["default"] is not None else ","
    told = [*(["required"] if known["required"] else []), known["expected"]]
    return f"{text}  # {'; '.join(filter(None, told))}" if any(told) else text


def _type_text(written: Any) -> str:
    if written is inspect.Parameter.empty:
        return "Any"
    text = written if isinstance(written, str) else inspect.formatannotation(written)
    text = text.replace(inspect.formatannotation(jax.typing.ArrayLike), "ArrayLike")
    return re.sub(r"\b(?:[a-z_0-9]+\.)+(?=[A-Za-z])", "", text)


def _place(entry: gin_internals.Configurable) -> tuple[str, int]:
    """Module and line, which do not depend on what was imported first."""
    code = inspect.unwrap(entry.function)
    try:
        return code.__module__, inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return code.__module__, 0


def _file_of(code: Any) -> str:
    """File and line, from the folder that the package or the user's module lies in."""
    try:
        file, line = inspect.getsourcefile(code) or "", inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return code.__module__
    # As many folders as its package has names, wherever that was found.
    return f"{Path(*Path(file).parts[-len(code.__module__.split('.')) :])}:{line}"


@functools.cache
def _bound_in() -> dict[str, list[str]]:
    """Whole name of a function -> the shipped files that bind it themselves."""
    found: dict[str, list[str]] = {}
    for file in parser.shipped():
        for item in parser.read([file], []):
            where = key(item) if isinstance(item, Binding) and item.depth == 0 else None
            if where and file not in found.setdefault(where[1], []):
                found[where[1]].append(file)
    return found


def print_list(name: str, imports: tuple[str, ...], *, as_json: bool) -> int:
    """Prints what gin files can name: all, or one function or file; returns the exit status.

    Args:
        name: '' for all.
        imports: Modules that register more.
        as_json: Whether to print JSON.

    Raises:
        UsageError: There is nothing of this name.
    """
    groups = everything(imports)
    if not name:
        print(json.dumps(groups, indent=2) if as_json else as_text(groups))
        return 0
    entries = [entry for group in groups for entry in group["entries"]]
    found = [entry for entry in entries if name in (entry["name"], entry.get("selector"))]
    if not found:
        hint = did_you_mean(name, [entry["name"] for entry in entries])
        raise UsageError(f"--list {name}: there is nothing of this name.{hint}")
    if as_json:
        print(json.dumps(found[0], indent=2))
    else:
        print(in_full(found[0]))
    return 0
