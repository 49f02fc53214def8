"""`python -m research_dp.plan`: what strategies cost on devices that need not be there."""

from research_dp.commands.main import doorway

main = doorway(__name__, "plan")
