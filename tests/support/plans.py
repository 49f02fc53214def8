"""The plan of the digits, made in this process."""

from research_dp.commands import cli, configured
from research_dp.commands.plan import command

DIGITS = "--gin_file=gin/runs/digits.gin"
MLP = "--gin_file=gin/models/mlp.gin"


def plan(*flags):
    with configured.speaking_flags():
        return command(**cli.parse("plan", flags))
