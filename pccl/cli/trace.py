"""`pccl trace`: draws the flight recorders of all peers on one timeline, for Perfetto."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TextIO

from pccl.cli.arguments import add_master, add_timeout, add_token_file, natural, seconds, token_of
from pccl.cli.output import failed, show

if TYPE_CHECKING:
    from pccl.flight_recorder import Trace

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="draw all peers' most recent ops on one timeline",
        description="Fetches all peers' flight recorders from a master and writes them as one timeline for "
        "https://ui.perfetto.dev, with ops and their waits, compute, links, views and calls. It does not join the "
        "run. If the run uses a token or TLS, it needs a peer's settings (PCCL_TOKEN, PCCL_TLS_CA, PCCL_TLS_CERT).",
    )
    add_master(parser)
    option = parser.add_argument
    help_text = "the file to write, or - for standard output (default: %(default)s)"
    option("-o", "--output", metavar="FILE", default="trace.json", help=help_text)
    help_text = "only the last N seconds (default: all)"
    option("--seconds", metavar="N", type=seconds, default=0.0, help=help_text)
    help_text = "only the last N ops of each peer, and unfinished ones (default: all)"
    option("--last", metavar="N", type=natural, default=0, help=help_text)
    help_text = "read the recordings from these PCCL_TRACE_DIR files instead of asking a master"
    option("--files", metavar="FILE", nargs="+", help=help_text)
    add_token_file(parser)
    add_timeout(parser, 60.0, "draw only the recordings that arrive within this time")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pccl import PCCLError
    from pccl.flight_recorder import RecordingError, Replacement
    from pccl.trace import timeline

    output: str = arguments.output
    is_stdout = output in ("-", "/dev/stdout")
    try:  # before the request, so that the recordings are not lost if this fails
        file: AbstractContextManager[Replacement | None] = nullcontext() if is_stdout else Replacement(output)
    except OSError as error:
        return failed("pccl trace", f"{output or '-o'} cannot be written: {error.strerror}")
    with file as new:
        try:
            trace = _trace(arguments)
            drawing = timeline.encode(trace)
        except PCCLError as error:
            return failed("pccl trace", error.message)
        except (RecordingError, OSError, ValueError) as error:
            return failed("pccl trace", error)
        if new is None:
            show(drawing.decode(), end="")
        else:
            try:
                new.write(drawing)
            except OSError as error:
                return failed("pccl trace", f"{output} cannot be written: {error.strerror}")
    _summarize(trace, "the trace" if is_stdout else output, sys.stderr if is_stdout else sys.stdout)
    return 0 if any(peer.recording is not None for peer in trace.peers) else 1


def _trace(arguments: argparse.Namespace) -> Trace:
    from pccl.flight_recorder import collect, cut, load

    if arguments.files:
        return cut(load(arguments.files), arguments.seconds, arguments.last)
    token = token_of(arguments)
    return collect(
        arguments.address, seconds=arguments.seconds, last=arguments.last, token=token, timeout=arguments.timeout
    )


def _summarize(trace: Trace, what: str, stream: TextIO) -> None:
    from pccl.trace.clocks import shifts

    known = shifts(trace)
    for peer in trace.peers:
        name = f"peer {peer.peer} ({_printable(peer.name)})"
        if peer.recording is None:
            print(f"pccl trace: {name} is missing: {_printable(peer.lack)}", file=sys.stderr)
            continue
        shift = known[peer.peer]
        clock = f"clock within {shift.uncertainty_ns / 1000:.4g} us, by {shift.source}"
        print(f"{name}: {len(peer.recording.ops)} ops, {clock if shift.uncertainty_ns else shift.source}", file=stream)
    if trace.lack:
        print(f"pccl trace: {trace.lack}", file=sys.stderr)
    print(f"wrote {what}: open it at https://ui.perfetto.dev", file=stream)


def _printable(text: str) -> str:
    """Return text from another process with control characters escaped."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
