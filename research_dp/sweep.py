"""`python -m research_dp.sweep`: the product of files and values, each combination a run."""

import sys

from research_dp.commands import main as command_line

main = command_line.main_of("sweep")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
