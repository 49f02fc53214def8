"""`python -m research_dp.sweep`: the product of files and values, each combination a run."""

import sys

from research_dp.commands import exit_status

main = exit_status.main_of("sweep.Sweep")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
