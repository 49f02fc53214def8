"""`python -m research_dp.certify`: whether a strategy computes what a reference one computes."""

from research_dp.commands.main import doorway

main = doorway(__name__, "certify")
