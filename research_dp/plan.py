"""`python -m research_dp.plan`: what strategies cost on devices that need not be there."""

import sys

from research_dp.commands import exit_status

main = exit_status.main_of("plan.Plan")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
exit_status.leave_function(__name__, main)
