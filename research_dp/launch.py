"""`python -m research_dp.launch -n N -- FLAGS`: one run in several processes of this machine."""

from research_dp.commands.main import doorway

main = doorway(__name__, "launch")
