"""`python -m research_dp.sweep`: the product of files and values, each combination a run."""

from research_dp.commands.main import doorway

main = doorway(__name__, "sweep")
