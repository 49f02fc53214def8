"""`python -m research_dp.evaluate`: evaluates a checkpoint of a run, on any number of devices."""

import sys

from research_dp.commands import main as command_line

main = command_line.main_of("evaluate")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
command_line.leave_function(__name__, main)
