"""`pccl master`: runs a master until it is interrupted."""

from __future__ import annotations

import argparse
import signal
import ssl
import sys
from typing import TYPE_CHECKING

from pccl.cli.arguments import token_in
from pccl.cli.output import print_line

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_LISTEN = "0.0.0.0:48148"
DEFAULT_HTTP = "127.0.0.1:48149"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "master",
        help="run a master",
        description="Runs a master, which manages the membership of a run, until Ctrl-C or SIGTERM. When ready, it "
        "prints one line with its address, and with --http another with the page's URL. It logs to stderr at "
        "PCCL_LOG_LEVEL (such as INFO; default: WARN), and as JSON with PCCL_LOG_FORMAT=json.",
    )
    option = parser.add_argument
    help_text = "a name, an IPv4 or a bracketed IPv6 address; port 0 picks any free port (default: %(default)s)"
    option("--listen", metavar="HOST:PORT", default=DEFAULT_LISTEN, help=help_text)
    help_text = "admit only peers that know the token in this file (default: PCCL_TOKEN, if it is set)"
    option("--token-file", metavar="FILE", help=help_text)
    help_text = "the run's name: refuse peers that belong to a run with another name (default: PCCL_RUN, if it is set)"
    option("--run", dest="run_name", metavar="NAME", help=help_text)
    help_text = "seconds without a heartbeat after which a peer or the master is lost (default: PCCL_PEER_TIMEOUT or 5)"
    option("--peer-timeout", metavar="SECONDS", type=float, help=help_text)
    help_text = "threads per peer that move payload, 1 to 16 (default: PCCL_ENGINE_THREADS, else 1)"
    option("--engine-threads", metavar="N", type=int, help=help_text)
    help_text = (
        "serve the run's status at this address: a page (/), JSON (/status.json) and Prometheus metrics (/metrics). "
        "There is no authentication, so use a loopback address (default: off; without HOST:PORT, %(const)s)"
    )
    option("--http", metavar="HOST:PORT", nargs="?", const=DEFAULT_HTTP, help=help_text)
    help_text = (
        "additional host name for the page, such as a proxy's; repeatable. Requests for other names are refused, "
        "except /healthz"
    )
    option("--http-host", metavar="NAME", action="append", default=[], help=help_text)
    help_text = (
        "addresses of the other masters. A standby starts no run; it takes over a run that has lost its master if the "
        "run's peers also know the standby's address"
    )
    option("--standby-of", metavar="HOST:PORT[,...]", default="", help=help_text)
    help_text = (
        "directory for the run's durable state: a restarted master continues the recorded run and rejects peers that "
        "the run had evicted. Only one master at a time can use a directory. 'none' disables it (default: PCCL_STATE, "
        "else pccl/master-HOSTNAME-PORT in XDG_STATE_HOME or ~/.local/state; none for port 0 and for a standby)"
    )
    option("--state", metavar="DIR", help=help_text)
    starts = parser.add_mutually_exclusive_group()
    help_text = (
        "auto: continue the recorded run, or start a new one; new: discard the record and start a new run; resume: "
        "wait indefinitely for peers from an earlier run (default: %(default)s)"
    )
    starts.add_argument("--start", choices=("auto", "new", "resume"), default="auto", help=help_text)
    starts.add_argument("--found", dest="start", action="store_const", const="new", help=argparse.SUPPRESS)
    starts.add_argument("--resume", dest="start", action="store_const", const="resume", help=argparse.SUPPRESS)
    option("--tls-cert", metavar="FILE", help="use TLS with peers, with this certificate (PEM)")
    option("--tls-key", metavar="FILE", help="the certificate's key, if it is in another file")
    help_text = "admit only peers whose certificate was signed by a CA in this file"
    option("--tls-client-ca", metavar="FILE", help=help_text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pccl import MasterNode, PCCLError, logs

    logs.configure("WARN", in_background=True)
    node: MasterNode | None = None
    try:
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            node = MasterNode(
                listen_address=arguments.listen,
                token=token_in(arguments.token_file) if arguments.token_file else None,
                ssl_context=tls_context(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca),
                peer_timeout=arguments.peer_timeout,
                engine_threads=arguments.engine_threads,
                http=arguments.http,
                http_hosts=arguments.http_host,
                standby_of=arguments.standby_of,
                state=arguments.state,
                start=arguments.start,
                run_name=arguments.run_name,
            )
            node.run()
            print_line(f"pccl master listening on {node.address}")
            if node.http_address is not None:
                print_line(f"pccl master shows the run at http://{node.http_address}/")
            node.wait()
        except KeyboardInterrupt:
            if node is not None:
                node.interrupt()
            return 0
    except (PCCLError, ValueError, OSError) as error:
        print_line(f"pccl master: {error.message if isinstance(error, PCCLError) else error}", sys.stderr)
        return 1
    print_line("pccl master: ended unexpectedly", sys.stderr)
    return 1


def tls_context(certificate: str | None, key: str | None, client_ca: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for a master, or None without a certificate. Raise ValueError if a file cannot be used."""
    if certificate is None:
        if key or client_ca:
            raise ValueError("--tls-key and --tls-client-ca need --tls-cert")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        files = f"{certificate} and {key}" if key else f"{certificate} (which must also hold the key)"
        raise ValueError(f"no certificate and key in {files}: {error.strerror or error}") from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise ValueError(f"no certificates in {client_ca}: {error.strerror or error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
