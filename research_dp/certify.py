"""`python -m research_dp.certify`: whether a run's strategy computes what an oracle computes.

Runs your own configuration, step by step, under its strategy and under `--against`. Prints a
certificate, or the first difference that rounding does not explain, and its cause. With `--quick`
it certifies a strategy's gin file alone, on a small built-in run, in Linen and in NNX, within fixed
tolerances. See docs/certify.md.
"""

import sys

from research_dp.commands import exit_status

main = exit_status.main_of("certify.Certify", __doc__)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
