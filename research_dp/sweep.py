"""`python -m research_dp.sweep`: the product of files and bindings, each a run. See README.md."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.config import command_line, ending, environment, printing, sweeps
    from research_dp.training import preemption

    def body(session: ending.Session) -> int:
        options, varied = command_line.parse_sweep(argv, __doc__ or "")
        dimensions = [
            sweeps.binding_choices(name, text) if name else sweeps.file_choices(number, text)
            for number, (name, text) in enumerate(varied)
        ]
        environment.quieten_tensorflow()
        if options.dry_run:
            return sweeps.sweep(options, dimensions)
        with printing.dispensable(), preemption.before_steps():
            return sweeps.sweep(options, dimensions)

    return ending.told(body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
