"""`python -m research_dp.certify`: whether a strategy computes what a reference one computes."""

import sys

from research_dp.commands import exit_status

main = exit_status.main_of("certify.Certify")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
exit_status.leave_function(__name__, main)
