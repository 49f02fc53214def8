"""`python -m research_dp.plan`: what strategies cost on devices that need not be there.

Each strategy's training step is compiled for the devices that --topology names, and the program is
read: bytes, FLOPs and counts are exact, times are predicted from vendors' rates.
"""

import sys

from research_dp.commands import exit_status

main = exit_status.main_of("plan.Plan", __doc__)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
