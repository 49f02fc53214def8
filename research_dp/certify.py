"""`python -m research_dp.certify`: whether a strategy computes what a reference one computes."""

import sys

from research_dp.commands import main as command_line

main = command_line.main_of("certify")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
command_line.leave_function(__name__, main)
