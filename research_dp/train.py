"""`python -m research_dp.train`: trains what the gin files say. See README.md."""

from __future__ import annotations

import faulthandler
import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.config import command_line, ending, environment, show

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
        if look is None:
            print(cache, flush=True)
        return train(workdir=options.workdir, look=look, started=environment.started())

    return ending.told(body)


if __name__ == "__main__":
    faulthandler.enable()  # Python's stacks, too, where a library aborts
    sys.exit(main(sys.argv[1:]))
