"""Checks single bindings: unknown names, and values that a parameter's annotation refuses.

Where a user named another parameter, it finds the one by which the run sets the same.
"""

from __future__ import annotations

import cmath
import collections.abc
import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gin

from research_dp import argument_checks
from research_dp.argument_checks import choices_of, is_callable, members
from research_dp.argument_types import AnyDtype
from research_dp.config import gin_internals
from research_dp.config.parser import Binding, Macro, Mistake, Reference, references
from research_dp.config.reachability import Config

# Their classes are plain values. No configurable is the usual way to make one.
_PLAIN_MODULES = {"builtins", "typing", "collections", "jax", "jaxlib", "numpy"}
# Names that people give to parameters of Optax and of this package.
_ALIASES = {
    "lr": "learning_rate",
    "rate": "learning_rate",
    "learningrate": "learning_rate",
    "wd": "weight_decay",
    "dropout": "dropout_rate",
    "steps": "num_steps",
    "max_steps": "num_steps",
    "epochs": "num_steps",
    "grad_clip": "max_grad_norm",
    "clip_norm": "max_grad_norm",
    "gradient_accumulation_steps": "accumulation_steps",
    "save_every": "checkpoint_every",
}
# The parameters of schedules that scale them.
_SCALES = ("peak_value", "init_value", "value")


def mistakes(binding: Binding, macros: dict[str, Binding]) -> list[Mistake]:
    """What is wrong with one binding by itself; `macros` has the winning binding of each macro."""
    problems = [_unknown(binding.selector) if binding.selector else ""]
    entry = gin_internals.find(binding.selector) if not problems[0] else None
    if entry:
        named = {n: p for n, p in entry.parameters.items() if p.kind is not p.VAR_POSITIONAL}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in named.values())
        if binding.parameter in entry.denied:
            problems.append(f"{entry.name} takes this from the command, not from gin.")
        elif binding.parameter in entry.passed:
            problems.append(f"what calls {entry.name} passes this, so no binding has an effect.")
        elif binding.parameter not in named and not takes_any:
            hint = did_you_mean(binding.parameter, named)
            problems.append(f"{entry.name} has no parameter {binding.parameter!r}.{hint}")
    inside = [item for item in references(binding.value) if isinstance(item, Reference)]
    problems += [_unknown(reference.selector) for reference in inside]
    if any(problems):
        return [Mistake(binding.place, f"{binding}: {problem}") for problem in problems if problem]
    if entry is None or binding.parameter not in entry.parameters:
        return []
    start = f"{binding.name} = "
    try:
        value = _resolved(binding.value, macros, ())
    except RecursionError as error:
        return [Mistake(binding.place, f"{start}{binding.value!r}: {error}")]
    problem = complaint(value, annotation(entry.function, binding.parameter))
    if not problem:
        return []
    via, end = "", "" if problem.endswith("?") else "."
    if isinstance(binding.value, Macro):
        name = binding.value.name
        via = f" (%{name} is bound in {macros[name].place})"
    return [Mistake(binding.place, f"{start}{value!r}: {problem}{end}{via}", binding.name)]


def missing(name: str, bound: Iterable[str], *, evaluated: bool) -> list[str]:
    """The parameters that a function lacks, by its full name and those that are bound.

    A function that is `evaluated`, as `@f()`, gets no arguments.
    """
    entry = gin_internals.find(name)
    return [
        p.name
        for p in (entry.parameters.values() if entry else ())
        if p.name not in bound and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if p.default is gin.REQUIRED or (evaluated and p.default is p.empty)
    ]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest valid names, or all if there are few, as a sentence; '' if none is near."""
    known = sorted(known)
    # 'adamm' is near 'optax.adamw', by its last part.
    by_last = {item.split(".")[-1]: item for item in known} if "." not in name else {}
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    near += [by_last[last] for last in difflib.get_close_matches(name, by_last, n=3)]
    if near:
        return f" Did you mean {', '.join(dict.fromkeys(near))}?"
    return f" It has {', '.join(known)}." if 0 < len(known) < 20 else ""


def with_hint(mistakes: Sequence[Mistake], binding: Binding, config: Config) -> list[Mistake]:
    """The mistakes of a binding; one of an unknown name says what sets the same in this run."""
    known = gin_internals.find(binding.selector) if binding.selector else None
    if not mistakes or (known and binding.parameter in known.parameters):
        return list(mistakes)
    first, *rest = mistakes
    hint = hint_for(binding.parameter, config)
    if not hint or " Did you mean" in first.message:
        return list(mistakes)
    message = re.split(r" It has | --list shows", first.message)[0]
    return [dataclasses.replace(first, message=message + hint), *rest]


def hint_for(parameter: str, config: Config) -> str:
    """A sentence that names the parameter of this run; '' if there is none of this name."""
    found = dict.fromkeys(_names_in_run(_ALIASES.get(parameter.lower(), parameter), config))
    return f" In this run it is {' or '.join(found)}." if found else ""


def _names_in_run(parameter: str, config: Config) -> Iterator[str]:
    known = gin_internals.configurables()
    for function in sorted(config.functions):
        entry = known.get(function)
        if entry is None or parameter not in entry.parameters.keys() - entry.passed:
            continue
        bound = config.table.get(("", function, parameter))
        name = f"{entry.name}.{parameter}"
        scale = scale_of(bound.value) if bound else None
        yield f"{scale} ({name} is {bound.value!r})" if bound and scale else name


def scale_of(value: object) -> str | None:
    """The parameter that scales a schedule, e.g. 'warmup_cosine.peak_value' of @warmup_cosine()."""
    entry = gin_internals.find(value.selector) if isinstance(value, Reference) else None
    scales = [name for name in _SCALES if entry and name in entry.parameters]
    return f"{entry.name}.{scales[0]}" if entry and scales else None


def replaced_schedules(bindings: Sequence[Binding], config: Config) -> Iterator[str]:
    """What a number does that stands where a file has a schedule: its bindings become idle."""
    for binding in bindings:
        winner, scale = config.table[binding.key], scale_of(binding.value)
        if scale is None or not isinstance(winner.value, float | int) or winner not in config.used:
            continue
        idle = [other for other in config.unused if other.name == scale]
        without = f", so {idle[0]} ({idle[0].place}) has no effect" if idle else ""
        yield (
            f"{winner} replaces the schedule {binding.value!r} ({binding.place}){without}. "
            f"To keep the schedule, bind {scale} instead."
        )


def annotation(function: Callable[..., Any], name: str) -> Any:
    """A parameter's annotation ('return': the result's), or `Any` if there is none.

    A parameter called dtype expects one, although libraries annotate it with `Any`.
    """
    expected = argument_checks.annotation_of(function, name)
    vague = Any in members(expected)
    return AnyDtype | None if vague and re.fullmatch("(.*_)?dtype", name) else expected


def complaint(value: Any, expected: Any) -> str | None:
    """What to give instead of a value, as parsed from a file; None if the annotation accepts it."""
    if isinstance(value, Reference):
        return _reference_complaint(value, expected)
    if any(references(value)):
        return None  # their values are not known before they are called
    if not _is_finite(value):
        return "give a finite number" if isinstance(value, float) else "give finite numbers"
    if argument_checks.fits(value, expected):
        return None
    choices = choices_of(expected)
    texts = [choice for choice in choices if isinstance(choice, str)]
    near = difflib.get_close_matches(value, texts, n=1) if isinstance(value, str) else []
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return f"{'use' if choices else 'give'} {in_words(expected, value)}{hint}"


def in_words(expected: Any, like: Any = None) -> str:
    """E.g. 'an integer, or None'; an example is the valid one nearest to the wrong value `like`."""
    accepted = members(expected)
    arrays = [m for m in accepted if _package(m) in ("jax", "jaxlib", "numpy")]
    if float in accepted and arrays:
        # A scalar of any kind: a gin file would have a float.
        accepted = [m for m in accepted if m not in (*arrays, bool, int, complex)]
    phrases, examples = argument_checks.words_of(accepted), makers(expected)
    if examples:
        name = like.removesuffix("()") if isinstance(like, str) else ""
        meant, entry = Reference(name, True), gin_internals.find(name) if name else None
        if entry and _is_class(annotation(entry.function, "return")):  # `@` was forgotten
            examples = examples if complaint(meant, expected) else [repr(meant)]
        near = difflib.get_close_matches(f"@{like}", examples, n=1, cutoff=0.5)
        prefix = "a function, " if any(map(is_callable, accepted)) else ""
        optional = ["None"] if "None" in phrases else []
        phrases = [f"{prefix}e.g. {(near or examples)[0]}", *optional]
    return ", or ".join(phrases)


def makers(expected: Any) -> list[str]:
    """References that give what is expected: '@convnet()' for a model, '@mapped' for an engine."""
    examples = []
    for part in members(expected):
        is_function = typing.get_origin(part) is collections.abc.Callable
        result = (typing.get_args(part) or [None])[-1] if is_function else part
        if not _is_class(result) or _package(result) in _PLAIN_MODULES:
            continue
        for entry in gin_internals.configurables().values():
            if annotation(entry.function, "return") is result:
                examples.append(f"@{entry.name}" + ("" if is_function else "()"))
    return examples  # in the order of registration, the usual ones first


def _unknown(selector: str) -> str:
    """What is wrong with a function's name; '' if it names one function."""
    names = gin_internals.matching(selector)
    if any(name.startswith("gin.") for name in names):
        return f"{selector!r} is gin's own. Write %NAME for a macro."
    if len(names) > 1:
        return f"{selector!r} may be any of {', '.join(names)}; write one of them."
    if names:
        return ""
    known = {entry.name for entry in gin_internals.configurables().values()}
    hint = did_you_mean(selector, known)
    return f"there is no {selector!r}.{hint or ' --list shows all; is its module imported?'}"


def _resolved(value: Any, macros: dict[str, Binding], outer: tuple[str, ...]) -> Any:
    """A value with its bound macros replaced by their values.

    Raises:
        RecursionError: A macro is bound to itself, perhaps by way of others.
    """
    if isinstance(value, Macro) and value.name in macros:
        chain = (*outer, value.name)
        if value.name in outer:
            cycle = " = ".join(f"%{name}" for name in chain)
            raise RecursionError(f"{cycle} has no end. Bind one of them to a value.")
        return _resolved(macros[value.name].value, macros, chain)
    if isinstance(value, list | tuple):
        return type(value)(_resolved(item, macros, outer) for item in value)
    if isinstance(value, dict):
        return {k: _resolved(item, macros, outer) for k, item in value.items()}
    return value


def _reference_complaint(value: Reference, expected: Any) -> str | None:
    """The complaint about a reference, from the annotation of its function's result."""
    entry = gin_internals.find(value.selector)
    accepted = [member for member in members(expected) if member is not type(None)]
    if entry is None or not all(_is_plain(member) or is_callable(member) for member in accepted):
        return None
    takes_function = any(map(is_callable, accepted))
    returned = annotation(entry.function, "return")
    if not value.evaluated:
        if not takes_function:
            if returned is Any or returned in accepted:
                return f"@{value.name} is the function itself; @{value.name}() is what it returns"
            return f"give {in_words(expected)}"
        accepted = [typing.get_args(member)[-1] for member in accepted if typing.get_args(member)]
        if not accepted or not all(map(_is_class, accepted)):
            return None
    if not _is_class(returned):
        return None
    if any(_is_class(member) and issubclass(returned, member) for member in accepted):
        return None
    if value.evaluated and takes_function:
        if any("__call__" in vars(base) for base in returned.__mro__):
            return None
        return f"@{value.name}() is what the function returns; give the function, @{value.name}"
    return f"it returns {returned.__name__}; give {in_words(expected)}"


def _is_finite(value: Any) -> bool:
    """Whether the numbers inside a value are finite: gin cannot read others back."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float | complex) or cmath.isfinite(value)


def _package(part: Any) -> str:
    return getattr(part, "__module__", "").split(".")[0]


def _is_plain(part: Any) -> bool:
    """Whether it is a class, so that `isinstance` decides."""
    part = argument_checks.bare(part)
    origin = typing.get_origin(part)
    if origin is not None:
        return origin in argument_checks.CONTAINERS or origin is typing.Literal
    return _is_class(part) and not getattr(part, "_is_protocol", False)


def _is_class(part: Any) -> bool:
    return inspect.isclass(part) and part is not Any  # `Any` is a class since Python 3.11
