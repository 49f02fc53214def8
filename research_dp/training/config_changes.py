"""What a run that is continued has changed since its checkpoint was written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

# A binding of gin's own dump, whose value may go on in indented lines.
_BINDING = re.compile(r"^([^#\s][^\s=]*) = (.*(?:\n[ \t].*)*)", re.MULTILINE)
_UNBOUND = "unbound"


def changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    bound_at: Callable[[str], str | None] | None = None,
) -> list[str]:
    """A line for each binding, number of devices and processes, and version that changed.

    Args:
        before: `manifest.origin` of the checkpoint.
        now: That of this run.
        bound_at: Name of a parameter -> the file and line that bound it; None: not known.
    """
    old, new = _settings(before), _settings(now)
    lines = []
    for name in dict.fromkeys([*new, *old]):
        was, is_ = old.get(name, _UNBOUND), new.get(name, _UNBOUND)
        place = bound_at(name) if bound_at and name in new else None
        if was != is_:
            lines.append(f"{name}: {was} -> {is_}{f'  ({place})' if place else ''}")
    return lines


def _settings(origin: Mapping[str, Any]) -> dict[str, str]:
    """Name -> value of all that can change, as text."""
    config = _BINDING.findall(origin.get("config", ""))
    settings = {name: " ".join(value.removeprefix("\\").split()) for name, value in config}
    counts = {name: str(origin[name]) for name in ("devices", "processes") if name in origin}
    versions = {f"version of {k}": str(v) for k, v in origin.get("versions", {}).items()}
    return settings | counts | versions
