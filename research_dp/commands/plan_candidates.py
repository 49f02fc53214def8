"""Which strategies a plan compares, and the configuration of a run under each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from research_dp.analysis.topologies import Topology
from research_dp.commands.flags import Options
from research_dp.config import load as gin_config
from research_dp.config import parser
from research_dp.config.load import Config, Mistakes
from research_dp.config.name_checks import did_you_mean
from research_dp.config.parser import Mistake
from research_dp.errors import UsageError
from research_dp.planning.estimate import Row


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy to plan for.

    Attributes:
        name: What its row is called; '' for the run's own.
        files: Files that choose it, after the run's.
        bindings: Bindings that come after the run's.
    """

    name: str
    files: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()


def of(strategies: Sequence[str]) -> list[Candidate]:
    """The strategies that are named; the run's own if none is.

    Args:
        strategies: Each 'fsdp', 'my/own.gin', 'fsdp+h100_speed+bf16_collectives'; or 'all'.

    Raises:
        UsageError: There is no such strategy or file.
    """
    if not strategies:
        return [Candidate("")]
    known = [Path(file).stem for file in parser.shipped() if "/strategies/" in file]
    found: dict[str, Candidate] = {}
    for text in strategies:
        for name in known if text == "all" else [text]:
            first, *others = name.split("+")
            files = [_file(first, "strategies"), *(_file(other, "") for other in others)]
            label = "+".join(Path(word).stem for word in name.split("+"))
            one = Candidate(label, tuple(files))
            if found.setdefault(label, one) != one:
                raise UsageError(
                    f"--strategies: {', '.join(found[label].files)} and {', '.join(one.files)} "
                    f"would both be row {label!r}. Rename a file."
                )
    return list(found.values())


def _file(name: str, folder: str) -> str:
    """A file by its path, or a shipped one by its stem."""
    if name.endswith(".gin"):
        if parser.find(name) is None:
            raise UsageError(f"--strategies: no file {name}.")
        return name
    shipped = {Path(f).stem: f for f in parser.shipped() if not folder or f"/{folder}/" in f}
    if name not in shipped:
        hint = did_you_mean(name, shipped)
        raise UsageError(f"--strategies: no shipped file {name!r}.{hint} Or give a path to one.")
    return shipped[name]


def check(options: Options, candidates: Sequence[Candidate]) -> dict[str, bool]:
    """Whether each candidate's configuration is right with nothing bound in vain, by name.

    What has no effect under some strategies may have one under others, and is let through there.

    Raises:
        Mistakes: Something is wrong under every strategy, or in vain under every one.
    """
    strict: dict[str, bool] = {}
    mistakes: list[dict[str, Mistake]] = []
    for candidate in candidates:
        try:
            load(options, candidate)
            strict[candidate.name] = True
            mistakes.append({})
        except Mistakes as error:
            strict[candidate.name] = False
            # By their places: what a message suggests instead depends on the strategy.
            mistakes.append({mistake.place or str(mistake): mistake for mistake in error.mistakes})
    common = [m for place, m in mistakes[0].items() if all(place in found for found in mistakes)]
    if common:
        raise Mistakes(common)
    return strict


def load(options: Options, candidate: Candidate, *, allow_unused: bool = False) -> Config:
    """Binds the run with a candidate's strategy."""
    return gin_config.load(
        [*options.gin_files, *candidate.files],
        [*options.bindings, *candidate.bindings],
        imports=options.imports,
        allow_unused=options.allow_unused or allow_unused,
        whole=True,
    )


def variants(candidate: Candidate, row: Row, where: Topology) -> list[Candidate]:
    """What else a strategy could be: other dtypes, whole parameters kept, groups of one host."""
    found = []
    wide = {
        one["kind"]
        for one in row.collectives or ()
        if one["dtype"] == "f32" and one["wire_bytes"] > 0.01 * row.wire_total
    }
    # What a slot has no part in, the compiler's or an update's, has no dtype to choose.
    gathers = "all-gather" in wide and "gather" in row.slots
    sums = bool(wide - {"all-gather"}) and bool({"gather", "sync"} & set(row.slots))
    for stem, helps in (("bf16_gather", gathers), ("bf16_collectives", gathers or sums)):
        file = f"gin/precision/{stem}.gin"
        if helps and file not in candidate.files:
            found.append(Candidate(f"{row.strategy}+{stem}", (*candidate.files, file)))
    if row.mesh and row.mesh["fsdp"] > 1:
        found += [_instead(candidate, stem, stem) for stem in ("fsdp", "fsdp_keep")]
        groups, members = where.domains
        if groups > 1 and members > 1:
            axes = f"make_mesh.axes = {{'data': {groups}, 'fsdp': {members}}}"
            found.append(_instead(candidate, "hsdp", f"hsdp {groups} x {members}", axes))
    return found


def _instead(candidate: Candidate, stem: str, label: str, *bindings: str) -> Candidate:
    """A candidate under another shipped strategy; its further files stay."""
    _, *others = candidate.files or ("",)
    name = "+".join([label, *(Path(file).stem for file in others)])
    return Candidate(name, (f"gin/strategies/{stem}.gin", *others), bindings)
