"""`python -m research_dp.train`: trains what gin files say, or resumes it."""

from research_dp.commands.main import doorway

main = doorway(__name__, "train")
