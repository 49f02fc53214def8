"""Trains what gin files say, or shows what it would be, or what they can name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from research_dp.commands import catalog, dry_run, next_steps, runtime, streams
from research_dp.commands.flags import RunCommand, flag, switch, whole_number
from research_dp.runs import files
from research_dp.training import loop


@dataclasses.dataclass
class Train(RunCommand):
    """`list` is None without --list, and '' for a list of everything."""

    dry_run: bool = switch("check and show the configuration; train nothing")
    list: str | None = flag(
        "show what gin files can name: all, a group (strategies), or one name; train nothing",
        "NAME",
        nargs="?",
        const="",
    )
    json: bool = switch("with --list: as JSON")
    coordinator: str | None = flag(
        "one run of several processes: where process 0 listens; auto: ask the cluster",
        "HOST:PORT|auto",
    )
    num_processes: int | None = flag("how many processes there are", "N", type=whole_number)
    process_id: int | None = flag(
        "which one this is, from 0", "I", type=functools.partial(whole_number, least=0)
    )
    heartbeat_seconds: int = flag(
        "seconds without a heartbeat after which a process counts as dead, and the others end",
        "S",
        default=100,
        type=whole_number,
    )

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        if self.list is not None:
            if self.gin_files or self.bindings:
                refuse("--list shows what there is, not a run: leave out gin files and bindings")
            return
        if self.json:
            refuse("--json goes with --list: --list --json, or --list=NAME --json")
        super().check(refuse)

    def run(self) -> int:
        if self.list is not None:
            return catalog.print_list(self.list, self.imports, as_json=self.json)
        with contextlib.nullcontext() if self.dry_run else streams.dispensable():
            folder = self.workdir and files.absolute(self.workdir)
            config = self.load()
            runtime.set_up_processes(
                self.coordinator, self.num_processes, self.process_id, self.heartbeat_seconds
            )
            runtime.set_up_devices(self.cpu_devices)
            cache = runtime.set_up_compilation_cache()
            if not self.dry_run:
                print(cache, flush=True)
            status = loop.train(
                workdir=folder,
                inspect=functools.partial(dry_run.show, config) if self.dry_run else None,
                started=runtime.started(),
                bound=config.bound(),
            )
            if folder and not self.dry_run and status == loop.DONE:
                next_steps.show(Path(folder))
            return status
