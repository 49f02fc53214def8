"""`python -m research_dp.sweep`: the product of files and bindings, each a run. See README.md."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.config import command_line, environment, sweeps
    from research_dp.distributed.errors import UsageError

    options, varied = command_line.parse_sweep(argv, __doc__ or "")
    try:
        dimensions = [
            sweeps.binding_choices(name, text) if name else sweeps.file_choices(number, text)
            for number, (name, text) in enumerate(varied)
        ]
        environment.quieten_tensorflow()
        return sweeps.sweep(options, dimensions)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
