"""`python -m research_dp.train`: trains what the gin files say. See README.md."""

from __future__ import annotations

import faulthandler
import sys

from research_dp.config import printing


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.config import command_line, ending, environment, processes, show
    from research_dp.training import preemption

    def body(session: ending.Session) -> int:
        options = command_line.parse(argv, __doc__ or "")
        if options.list is not None:
            return show.print_list(options.list, options.imports, as_json=options.json)
        if options.dry_run:
            return trained(session, options)
        with printing.dispensable(), preemption.before_steps():
            return trained(session, options)

    def trained(session: ending.Session, options: command_line.Options) -> int:
        config = session.load(options)
        environment.quieten_tensorflow()
        processes.set_up_processes(options.processes)
        environment.set_up_devices(options.cpu_devices)
        cache = environment.set_up_compilation_cache()
        from research_dp.training.loop import train

        look = show.look(config) if options.dry_run else None
        if look is None:
            print(cache, flush=True)
        return train(
            workdir=options.workdir,
            look=look,
            started=environment.started(),
            bound_at=config.origin,
        )

    return ending.told(body)


if __name__ == "__main__":
    printing.repair()  # the fault handler needs a standard error
    faulthandler.enable()  # Python's stacks, too, where a library aborts
    sys.exit(main(sys.argv[1:]))
