"""The plan of the digits, made in this process."""

from research_dp.commands import cli, configured
from research_dp.commands.plan import command
from tests.support.runs import WITH_MLP

DIGITS, MLP = WITH_MLP


def plan(*flags):
    with configured.speaking_flags():
        return command(**cli.parse("plan", flags))
