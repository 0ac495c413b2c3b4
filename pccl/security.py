"""Checks of run name, token, encryption and TLS settings, which default to the environment, and warnings about them."""

from __future__ import annotations

import os
import ssl
import warnings
from typing import Any

from pccl.errors import invalid
from pccl.protocol.names import NAME_CHARACTERS_MAX, is_name
from pccl.runtime.network import addresses, handshake

RUN_VARIABLE = "PCCL_RUN"
"""A name for the run. A master refuses peers of a run with another name; a missing name matches any."""
TOKEN_VARIABLE = "PCCL_TOKEN"
ENCRYPT_VARIABLE = "PCCL_ENCRYPT"
"""If 1, peers encrypt the traffic between them; if 0, empty or unset, they do not."""
CA_VARIABLE = "PCCL_TLS_CA"
"""A file of CA certificates. One of them must have signed the master's certificate."""
CERT_VARIABLE = "PCCL_TLS_CERT"
KEY_VARIABLE = "PCCL_TLS_KEY"
"""A peer's own certificate and key, for a master that requires client certificates."""


def token(argument: str | None, func_name: str) -> str:
    """Return the run's shared secret, or "" if there is none. Raise INVALID_ARGUMENT if it is not text."""
    found = os.environ.get(TOKEN_VARIABLE, "") if argument is None else argument
    if not isinstance(found, str):
        raise invalid(func_name, f"the token must be a str, not {type(found).__name__}")
    if not found.isascii() and found != found.encode(errors="replace").decode():
        raise invalid(func_name, "the token is not valid Unicode text")
    return found.strip()  # files end with a newline


def run_name(argument: str | None, func_name: str) -> str:
    """Return the user's name for the run, or "" if there is none. Raise INVALID_ARGUMENT unless it is printable."""
    found = os.environ.get(RUN_VARIABLE, "") if argument is None else argument
    if not isinstance(found, str) or not is_name(found):
        must = f"must be printable text of at most {NAME_CHARACTERS_MAX} characters"
        raise invalid(func_name, f"{RUN_VARIABLE if argument is None else 'run_name'} {found!r}: {must}")
    return found.strip()


def encryption(argument: Any, token: str, func_name: str) -> bool:
    """Return whether peers encrypt traffic between them. Raise INVALID_ARGUMENT if they should but cannot encrypt."""
    origin = "encrypt=True"
    if argument is None:
        text = os.environ.get(ENCRYPT_VARIABLE, "").strip()
        if text not in ("", "0", "1"):
            raise invalid(func_name, f"{ENCRYPT_VARIABLE}={text!r} is neither 0 nor 1")
        argument = text == "1"
        origin = f"{ENCRYPT_VARIABLE}=1"
    if not isinstance(argument, bool):
        name = type(argument).__name__
        raise invalid(func_name, f"encrypt must be True, False or None, not {name}")
    if argument and not token:
        raise invalid(func_name, f"{origin} needs a token to derive keys from: token= or {TOKEN_VARIABLE}")
    missing = handshake.why_unavailable() if argument else ""
    if missing:
        raise invalid(func_name, f"{origin}: {missing}")
    return argument


def checked_context(argument: Any, func_name: str) -> ssl.SSLContext | None:
    """Return the argument. Raise INVALID_ARGUMENT unless it is an SSLContext or None."""
    if argument is not None and not isinstance(argument, ssl.SSLContext):
        raise invalid(func_name, f"ssl_context must be an ssl.SSLContext, not {type(argument).__name__}")
    return argument


def client_tls(argument: ssl.SSLContext | None, func_name: str) -> ssl.SSLContext | None:
    """Return the TLS context for the connection to the master: the argument, or one made from the files that the
    environment names, or None without TLS. Raise INVALID_ARGUMENT if the files cannot be used."""
    ca = os.environ.get(CA_VARIABLE)
    if argument is not None or not ca:
        return checked_context(argument, func_name)
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise invalid(func_name, f"{CA_VARIABLE}={ca!r} cannot be used: {error.strerror or error}") from None
    certificate = os.environ.get(CERT_VARIABLE)
    if certificate:
        try:
            context.load_cert_chain(certificate, os.environ.get(KEY_VARIABLE) or None)
        except OSError as error:
            text = f"{CERT_VARIABLE}={certificate!r} and {KEY_VARIABLE} cannot be used: {error.strerror or error}"
            raise invalid(func_name, text) from None
    return context


class ExposedWarning(UserWarning):
    """Hosts other than a run's peers can reach the run and join or read it."""


def warn_if_shown(host: str, stacklevel: int) -> None:
    """Warn if the status page, which has no authentication, is served at an address that other hosts may reach."""
    if not addresses.is_loopback(host):
        text = (
            f"the status page is served on {host or 'every interface'}: every host that reaches it can read the "
            f"peers' names and addresses, and the log. Use a loopback address with a tunnel, or a proxy with "
            f"authentication."
        )
        warnings.warn(text, ExposedWarning, stacklevel=stacklevel + 1)


_has_warned = False


def warn_if_exposed(host: str, token: str, stacklevel: int) -> None:
    """Warn, once per process, if pccl listens without a token on a public address ("" means every interface)."""
    global _has_warned
    if token or _has_warned:
        return
    address = addresses.public_reach(host)
    if address is not None:
        _has_warned = True
        text = (
            f"pccl listens on the public address {address} without a token: every host that reaches it can join the "
            f"run, and read and change its data. Give the master and all peers a token (token=, "
            f"PCCL_TOKEN, `pccl master --token-file`), or listen on a private address (listen=, `--listen`)."
        )
        warnings.warn(text, ExposedWarning, stacklevel=stacklevel + 1)
