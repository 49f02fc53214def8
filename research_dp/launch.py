"""`python -m research_dp.launch -n N -- FLAGS`: one run in several processes of this machine."""

import sys

from research_dp.commands.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
