"""`python -m research_dp.conform`: the former name of `research_dp.certify --quick`."""

import sys

from research_dp.commands import streams
from research_dp.commands.main import main_of


@streams.usable()
def main(argv: list[str]) -> int:
    """Runs `certify --quick`; returns its exit status."""
    print("research_dp.conform is now: python -m research_dp.certify --quick", file=sys.stderr)
    return main_of("certify")(["--quick", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
