"""`python -m research_dp.plan`: what strategies cost on devices that need not be there."""

import sys

from research_dp.commands import main as command_line

main = command_line.main_of("plan")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
command_line.leave_function(__name__, main)
