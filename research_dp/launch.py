"""`python -m research_dp.launch -n N -- FLAGS`: one run in several processes of this machine."""

import sys

from research_dp.commands import main as command_line

main = command_line.main_of("launch")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
