"""`python -m research_dp.compare`: runs side by side, and whether they computed the same."""

import sys

from research_dp.commands import main as command_line

main = command_line.main_of("compare")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
command_line.leave_function(__name__, main)
