"""`python -m research_dp COMMAND ...`: the same as `research-dp COMMAND ...`."""

import sys

from research_dp.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
