"""`pccl completion`: prints what makes a shell complete the command line, made of the parsers themselves."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pccl.cli.output import say

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Prints a script that makes a shell complete pccl's commands, options and their values.

  bash   pccl completion bash > ~/.local/share/bash-completion/completions/pccl
  zsh    pccl completion zsh > "${fpath[1]}/_pccl"
  fish   pccl completion fish > ~/.config/fish/completions/pccl.fish

A shell that is started after that has it. Make it anew when pccl is updated.
"""
FILES = ("FILE", "DIR", "FOLDER", "PATH")
HELP_CHARACTERS = 72


@dataclass(frozen=True)
class Option:
    """One option of a command, or its positional arguments if it has no names."""

    names: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    is_file: bool
    help: str


@dataclass(frozen=True)
class Command:
    name: str
    help: str
    options: tuple[Option, ...]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print completions for a shell",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that is to complete")
    parser.set_defaults(run=partial(run, subparsers))


def run(subparsers: Subparsers, arguments: argparse.Namespace) -> int:
    say(SHELLS[arguments.shell](commands(subparsers)), end="")
    return 0


def commands(subparsers: Subparsers) -> list[Command]:
    """Return all commands and their options."""
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    return [
        Command(name, helps.get(name, ""), tuple(_option(each, action) for action in each._actions))
        for name, each in subparsers.choices.items()
    ]


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Option:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return Option(
        names=tuple(action.option_strings),
        takes_value=action.nargs != 0,
        choices=tuple(str(choice) for choice in action.choices or ()),
        is_file=metavar in FILES or (not action.option_strings and not action.choices),
        help=_short(text),
    )


def _short(text: str) -> str:
    """Return the beginning of a help text, without what shells might take for their own."""
    first = re.split(r"; |\. | \(default| \(e\.g\.", " ".join(text.split()))[0]
    first = re.sub(r"[\"'`$\\\[\]:]", "", first)
    return first if len(first) <= HELP_CHARACTERS else first[: HELP_CHARACTERS - 3].rsplit(" ", 1)[0] + "..."


def bash(all_commands: Sequence[Command]) -> str:
    """Return a script for bash."""
    names = " ".join(command.name for command in all_commands)
    options, values = [], []
    for command in all_commands:
        own = [name for option in command.options for name in option.names]
        positional = [choice for option in command.options if not option.names for choice in option.choices]
        options.append(
            f"        {command.name}) options={shlex.quote(' '.join(own))} words='{' '.join(positional)}' ;;"
        )
        for option in command.options:
            if option.names and option.takes_value:
                found = f"words='{' '.join(option.choices)}'" if option.choices else "words="
                values.append(f"        {'|'.join(f'{command.name}:{name}' for name in option.names)}) {found} ;;")
    newline = "\n"
    return f"""# bash completion of pccl; `pccl completion bash` prints it
_pccl() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local options words
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
        return
    fi
    case "$command:$previous" in
{newline.join(values)}
        *) words=- ;;
    esac
    if [[ $words != - ]]; then # the value of an option; files where it has no choices
        [[ -z $words ]] || COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    case "$command" in
{newline.join(options)}
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
    elif [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
}}
complete -o bashdefault -o default -F _pccl pccl
"""


def zsh(all_commands: Sequence[Command]) -> str:
    """Return a script for zsh."""
    names = "\n".join(f"    '{command.name}:{_short(command.help)}'" for command in all_commands)
    cases = []
    for command in all_commands:
        positional = [option for option in command.options if not option.names]
        options = [_zsh_spec(option) for option in command.options if option.names]
        choices = " ".join(choice for option in positional for choice in option.choices)
        if positional:
            options.append(f"'*:argument:{f'({choices})' if choices else '_files'}'")
        specs = " \\\n            ".join(options)
        cases.append(f"        {command.name})\n          _arguments -s \\\n            {specs} ;;")
    newline = "\n"
    return f"""#compdef pccl
# zsh completion of pccl; `pccl completion zsh` prints it
_pccl() {{
  local -a commands
  commands=(
{names}
  )
  _arguments -C '1:command:->command' '*::argument:->arguments' '--version[print the version]' '--help[print help]'
  case $state in
    command) _describe command commands ;;
    arguments)
      case $words[1] in
{newline.join(cases)}
      esac ;;
  esac
}}
if [[ $funcstack[1] == _pccl ]]; then _pccl "$@"; else compdef _pccl pccl; fi
"""


def _zsh_spec(option: Option) -> str:
    action = f"({' '.join(option.choices)})" if option.choices else "_files" if option.is_file else " "
    value = f":value:{action}" if option.takes_value else ""
    if len(option.names) == 1:
        return f"'{option.names[0]}[{option.help}]{value}'"
    excluded, braces = " ".join(option.names), ",".join(option.names)
    return f"'({excluded})'{{{braces}}}'[{option.help}]{value}'"


def fish(all_commands: Sequence[Command]) -> str:
    """Return a script for fish."""
    lines = ["# fish completion of pccl; `pccl completion fish` prints it", "complete -c pccl -f"]
    lines += ["complete -c pccl -n __fish_use_subcommand -l version -d 'print the version'"]
    for command in all_commands:
        lines.append(f"complete -c pccl -n __fish_use_subcommand -a {command.name} -d '{_short(command.help)}'")
        seen = f"complete -c pccl -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            choices = f" -a '{' '.join(option.choices)}'" if option.choices else ""
            if option.names:
                value = (" -r -F" if option.is_file else " -x") if option.takes_value else ""
                lines.append(f"{seen} {names}{value}{choices} -d '{option.help}'")
            else:
                lines.append(f"{seen}{choices or ' -F'}")
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
