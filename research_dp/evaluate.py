"""`python -m research_dp.evaluate`: evaluates a checkpoint of a run, on any number of devices."""

from research_dp.commands.main import doorway

main = doorway(__name__, "evaluate")
