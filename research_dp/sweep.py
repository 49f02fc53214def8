"""`python -m research_dp.sweep`: the product of files and bindings, each a run. See README.md."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.commands import exit_status, flags, runtime, streams, sweep
    from research_dp.training import preemption

    def body(session: exit_status.Session) -> int:
        options, varied = flags.parse_sweep(argv, __doc__ or "")
        dimensions = [
            sweep.binding_choices(name, text) if name else sweep.file_choices(number, text)
            for number, (name, text) in enumerate(varied)
        ]
        runtime.quieten_tensorflow()
        if options.dry_run:
            return sweep.sweep(options, dimensions)
        with streams.dispensable(), preemption.exit_on_signals():
            return sweep.sweep(options, dimensions)

    return exit_status.run_command(body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
