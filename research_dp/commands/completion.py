"""Completion in bash of commands, flags and shipped gin files, by shtab from the parsers."""

from __future__ import annotations

import argparse

import shtab

from research_dp.commands import cli, entries
from research_dp.config import parser

_FILES = """_research_dp_gin_files() {{
  compgen -W '{shipped}' -- "$1"
  compgen -o plusdirs -f -X '!*.gin' -- "$1"
}}"""
# Readline splits --gin_file=F into three words, and argparse takes F as a word of its own.
_EQUALS = """_research_dp() {
  local words=() i last=$COMP_CWORD
  for ((i = 0; i <= last; i++)); do
    [[ ${COMP_WORDS[i]} == "=" ]] || words+=("${COMP_WORDS[i]}")
  done
  [[ ${COMP_WORDS[last]} == "=" ]] && words+=("")
  COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
  _shtab_research_dp
}
complete -o default -o filenames -F _research_dp research-dp"""


def script() -> str:
    """What bash sources, e.g. in ~/.bashrc: `source <(research-dp --completion bash)`."""
    every = argparse.ArgumentParser("research-dp")
    every.add_argument("--version", "--completion", action="store_true")
    commands = every.add_subparsers()
    for name, entry in entries.COMMANDS.items():
        # The words after `launch ... --` are those of train.
        parents = [cli.parser_of("train" if name == "launch" else name)]
        command = commands.add_parser(name, help=entry.summary, parents=parents, add_help=False)
        if name == "launch":
            command.add_argument("-n", "--post_mortem", "--module")
        for action in command._actions:
            action.option_strings = [one for one in action.option_strings if "NAME" not in one]
            if action.dest == "gin_files":
                action.complete = {"bash": "_research_dp_gin_files"}  # type: ignore[attr-defined]
    files = _FILES.format(shipped=" ".join(parser.shipped()))
    return "\n".join([shtab.complete(every, "bash", preamble=files), _EQUALS])
