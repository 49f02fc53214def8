"""`python -m research_dp.sweep`: the product of files and bindings, each a run. See README.md."""

import sys

from research_dp.commands import exit_status

main = exit_status.main_of("sweep.Sweep", __doc__)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
