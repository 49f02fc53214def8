"""`python -m research_dp.train`: trains what the gin files say. See README.md."""

from __future__ import annotations

import faulthandler
import sys

from research_dp.commands import streams


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.commands import catalog, dry_run, exit_status, flags, processes, runtime
    from research_dp.training import preemption

    def body(session: exit_status.Session) -> int:
        options = flags.parse(argv, __doc__ or "")
        if options.list is not None:
            return catalog.print_list(options.list, options.imports, as_json=options.json)
        if options.dry_run:
            return trained(session, options)
        with streams.dispensable(), preemption.exit_on_signals():
            return trained(session, options)

    def trained(session: exit_status.Session, options: flags.Options) -> int:
        config = session.load(options)
        runtime.quieten_tensorflow()
        processes.set_up_processes(options.processes)
        runtime.set_up_devices(options.cpu_devices)
        cache = runtime.set_up_compilation_cache()
        from research_dp.training.loop import train

        inspect = dry_run.inspect(config) if options.dry_run else None
        if inspect is None:
            print(cache, flush=True)
        return train(
            workdir=options.workdir,
            inspect=inspect,
            started=runtime.started(),
            bound_at=config.origin,
        )

    return exit_status.run_command(body)


if __name__ == "__main__":
    streams.repair()  # the fault handler needs a standard error
    faulthandler.enable()  # Python's stacks, too, where a library aborts
    sys.exit(main(sys.argv[1:]))
