"""`python -m research_dp.train`: trains what gin files say, or resumes it."""

import faulthandler
import sys

from research_dp.commands import main as command_line
from research_dp.commands import streams

main = command_line.main_of("train")

if __name__ == "__main__":
    streams.repair()  # the fault handler needs a standard error
    faulthandler.enable()  # Python's stacks, too, where a library aborts
    sys.exit(main(sys.argv[1:]))
