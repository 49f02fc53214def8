"""Finds the parameter by which a run sets something, where a user named another one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from research_dp.config import gin_internals
from research_dp.config.parser import Binding, Mistake, Reference
from research_dp.config.reachability import Config

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


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the functions that a run calls can be given."""

    config: Config

    def with_hints(self, binding: Binding, mistakes: Sequence[Mistake]) -> list[Mistake]:
        """The mistakes of a binding; one of an unknown name says what sets the same in this run."""
        known = gin_internals.find(binding.selector) if binding.selector else None
        if not mistakes or (known and binding.parameter in known.parameters):
            return list(mistakes)
        first, *rest = mistakes
        hint = self.hint(binding.parameter)
        if not hint or " Did you mean" in first.message:
            return list(mistakes)
        message = re.split(r" It has | --list shows", first.message)[0]
        return [dataclasses.replace(first, message=message + hint), *rest]

    def hint(self, parameter: str) -> str:
        """A sentence that names the parameter of this run; '' if there is none of this name."""
        found = dict.fromkeys(self._named(_ALIASES.get(parameter.lower(), parameter)))
        return f" In this run it is {' or '.join(found)}." if found else ""

    def _named(self, parameter: str) -> Iterator[str]:
        known = gin_internals.configurables()
        for function in sorted(self.config.functions):
            if function not in known or parameter not in known[function].parameters:
                continue
            bound = self.config.table.get(("", function, parameter))
            name = f"{known[function].name}.{parameter}"
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
