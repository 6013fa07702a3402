"""Which machines and names the server answers: this machine alone, unless the user asks for more.

`--server.address` (or `kvlens app --host`) beyond the loopback asks for other machines; `--server.allowedHosts` asks
for other names, as a reverse proxy passes them on. An address that is not set asks for nothing, although Streamlit then
listens on all interfaces."""

from __future__ import annotations

import ipaddress
import socket

import streamlit as st

from kvlens.app.ui.common.settings import settings

ADDRESS, HOSTS = "server.address", "server.allowedHosts"
EVERY_HOST = "*"


def is_loopback(address: str) -> bool:
    """Return True for 'localhost' and for an address that only this machine reaches."""
    if address.lower() == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def is_beyond_loopback() -> bool:
    """Return True if the user asked for an address that other machines reach."""
    address = st.get_option(ADDRESS)
    return bool(address) and not is_loopback(str(address))


def allowed_hosts() -> list[str]:
    """Return the names that the server goes by; '*' stands for all.

    The user's `server.allowedHosts`, else the loopback's names of the settings file. A server beyond the loopback goes
    by every name if the user gave none: the token keeps others out."""
    usual = list(settings()[HOSTS])
    names = list(st.get_option(HOSTS)) or usual
    return [EVERY_HOST] if names == usual and is_beyond_loopback() else names


def is_open_to(client: str | None) -> bool:
    """Return True if the server answers a client of this address. None: a client without a network address."""
    return client is None or is_loopback(client) or answers_others()


def answers_others() -> bool:
    """Return True if the server answers other machines, by its address or through a proxy."""
    return is_beyond_loopback() or not set(allowed_hosts()) <= {*settings()[HOSTS], str(st.get_option(ADDRESS))}


def addresses() -> list[str]:
    """Return the server's addresses as a browser takes them, this machine's first, without a path."""
    address, port = str(st.get_option(ADDRESS) or "127.0.0.1"), st.get_option("server.port")
    scheme = "https" if st.get_option("server.sslCertFile") else "http"
    names = ["127.0.0.1", socket.gethostname()] if address in ("0.0.0.0", "::") else [address]
    return [f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}" for name in names]
