"""`python -m research_dp.checkpoints WORKDIR`: lists the checkpoints of a run, or exports one."""

from research_dp.commands.main import doorway

main = doorway(__name__, "checkpoints")
