"""Types for command-line arguments that several subcommands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
PlanT = TypeVar("PlanT", bound=msgspec.Struct)

DEFAULT_MASTER = "127.0.0.1:48148"


def positive(text: str) -> int:
    return _whole(text, 1)


def natural(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        hint = "; give the address first" if ":" in text else ""
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds{hint}")
    return value


def add_master(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        metavar="HOST:PORT",
        nargs="?",
        default=os.environ.get("PCCL_MASTER") or DEFAULT_MASTER,
        help="the master's address, or several separated by commas (default: PCCL_MASTER, else " + DEFAULT_MASTER + ")",
    )


def add_token_file(parser: argparse.ArgumentParser) -> None:
    help_text = "file with the run's token (default: the token in PCCL_TOKEN)"
    parser.add_argument("--token-file", metavar="FILE", help=help_text)


def add_timeout(parser: argparse.ArgumentParser, default_s: float, what: str) -> None:
    help_text = f"{what} (default: %(default)g)"
    parser.add_argument("--timeout", metavar="SECONDS", type=seconds, default=default_s, help=help_text)


def token_of(arguments: argparse.Namespace) -> str | None:
    return token_in(arguments.token_file) if arguments.token_file else None


def token_in(path: str) -> str:
    """Return the token in a file, without surrounding white space. OSErrors and ValueErrors name the file."""
    with open(path, encoding="utf-8") as file:
        token = file.read().strip()
    if not token:
        raise ValueError(f"{path} is empty; it must hold the run's token")
    return token


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the argument type of a comma-separated list whose items `parse` accepts."""

    def parse_all(text: str) -> list[T]:
        try:
            return [parse(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_all


def one_of(values: Mapping[str, T]) -> Callable[[str], T]:

    def parse(name: str) -> T:
        if name not in values:
            raise ValueError(f"{name!r} is not one of {', '.join(values)}")
        return values[name]

    return parse


class PlanOptions:
    """Adds options for the fields of a tool's plan. Each uses its field's default and, unless given, its type."""

    def __init__(self, parser: argparse.ArgumentParser, plan: type[msgspec.Struct]) -> None:
        self._parser = parser
        self._defaults = {field.name: field.default for field in msgspec.structs.fields(plan)}

    def __call__(self, name: str, help_text: str, **how: Any) -> None:
        default = self._defaults[how.setdefault("dest", name.removeprefix("--").replace("-", "_"))]
        if isinstance(default, bool):
            how |= {"action": argparse.BooleanOptionalAction}
            shown = "do" if default else "do not"
        else:
            if default is not None:
                how.setdefault("type", type(default))
            shown = f"{default:g}" if isinstance(default, float) else "none" if default is None else str(default)
        if "(default:" not in help_text:
            help_text = f"{help_text} (default: {shown})"
        self._parser.add_argument(name, default=default, help=help_text, **how)


def plan_of(arguments: argparse.Namespace, plan: type[PlanT], **more: Any) -> PlanT:
    """Return a plan made from `more` and the options that share a name with its fields."""
    return plan(**{name: value for name, value in vars(arguments).items() if name in plan.__struct_fields__}, **more)
