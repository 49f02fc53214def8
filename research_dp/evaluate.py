"""`python -m research_dp.evaluate`: evaluates a checkpoint of a run, on any number of devices."""

import sys

from research_dp.commands import exit_status

main = exit_status.main_of("evaluate.Evaluate")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
exit_status.leave_function(__name__, main)
