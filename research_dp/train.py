"""`python -m research_dp.train`: trains what the gin files say. See README.md."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.config import command_line, environment, gin_config
    from research_dp.distributed.errors import UsageError

    options = command_line.parse(argv, __doc__ or "")
    try:
        gin_config.load(options.gin_files, options.bindings)
        environment.quieten_tensorflow()
        environment.set_up_processes()
        environment.set_up_devices(options.cpu_devices)
        print(environment.set_up_compilation_cache(), flush=True)
        from research_dp.training.loop import train

        started = environment.started()
        return train(workdir=options.workdir, dry_run=options.dry_run, started=started)
    except (UsageError, TypeError, RuntimeError) as error:
        mistake = error if isinstance(error, UsageError) else gin_config.missing_binding(error)
        if mistake is None:
            raise
        print(_told(mistake, options), file=sys.stderr)
        return 2


def _told(error: Exception, options) -> str:
    """One or two lines: what is wrong, and where it was bound."""
    from research_dp.config.gin_config import origin

    message = str(error).split("\n  In call")[0]
    binding = getattr(error, "binding", None)
    place = binding and origin(binding, options.gin_files, options.bindings)
    return f"error: {message}" + (f"\n  bound in {place}" if place else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
