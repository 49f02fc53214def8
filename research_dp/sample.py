"""`python -m research_dp.sample FOLDER`: continues a prompt by a language model."""

from research_dp.commands.main import doorway

main = doorway(__name__, "sample")
