"""`python -m research_dp.compare`: runs side by side, and whether they computed the same."""

from research_dp.commands.main import doorway

main = doorway(__name__, "compare")
