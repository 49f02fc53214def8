"""`python -m research_dp.train`: trains what the gin files say. See README.md."""

from __future__ import annotations

import contextlib
import faulthandler
import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.config import command_line, ending, environment, printing, show

    options = command_line.parse(argv, __doc__ or "")

    def body(session: ending.Session) -> int:
        if options.list is not None:
            return show.print_list(options.list, options.imports, as_json=options.json)
        config = session.load(options)
        environment.quieten_tensorflow()
        environment.set_up_processes(options.processes)
        environment.set_up_devices(options.cpu_devices)
        cache = environment.set_up_compilation_cache()
        from research_dp.training.loop import train

        look = show.look(config) if options.dry_run else None
        stack = contextlib.ExitStack()
        if look is None:
            # Who stops reading does not stop training.
            stack.enter_context(printing.while_read())
            print(cache, flush=True)
        with stack:
            return train(
                workdir=options.workdir,
                look=look,
                started=environment.started(),
                bound_at=config.origin,
            )

    return ending.told(body)


if __name__ == "__main__":
    faulthandler.enable()  # Python's stacks, too, where a library aborts
    sys.exit(main(sys.argv[1:]))
