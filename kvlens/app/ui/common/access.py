"""The token that opens the dashboard, and the cookie that a browser has for it afterwards.

Each start of a server draws a token, unless KVLENS_TOKEN names one (16 characters at least) or is `off`. A request that
brings the token gets a cookie for COOKIE_DAYS days. The cookie is signed with a key of the user's own (`door.key` in
the cache folder), so that the pages of a browser go on when the server is started again; without the file every cookie
is void."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from kvlens.app.ui.common.reach import is_beyond_loopback
from kvlens.files import cache_dir, make_folder, write_file

VARIABLE, OFF = "KVLENS_TOKEN", "off"
PARAMETER = "token"
COOKIE = "kvlens_access"
COOKIE_DAYS = 30
LEAST_CHARACTERS = 16
_KEY_BYTES = 32
_SCHEMES = ("token", "bearer")
"""of an Authorization header"""


class TokenRefused(ValueError):
    """The server cannot start with this choice of token. `code`: token_required or token_too_short."""

    def __init__(self, code: str, sentence: str) -> None:
        self.code = code
        super().__init__(f"{code}: {sentence}")


def check_token(beyond_loopback: bool) -> None:
    """Raise TokenRefused if KVLENS_TOKEN turns the token off for a server beyond the loopback, or is too short."""
    setting = os.environ.get(VARIABLE, "")
    if setting == OFF and beyond_loopback:
        raise TokenRefused(
            "token_required", "a server that other machines reach needs its token; listen on 127.0.0.1 to go without."
        )
    if setting not in ("", OFF) and len(setting) < LEAST_CHARACTERS:
        raise TokenRefused(
            "token_too_short", f"{VARIABLE} has {len(setting)} characters; choose {LEAST_CHARACTERS} or more."
        )


def token() -> str | None:
    """Return the token of this server process; None if none is needed."""
    setting = os.environ.get(VARIABLE, "")
    if setting == OFF and not is_beyond_loopback():
        return None
    return _drawn() if setting == OFF or len(setting) < LEAST_CHARACTERS else setting


@cache
def _drawn() -> str:
    return secrets.token_urlsafe(24)


def is_granted(headers: Mapping[str, str]) -> bool:
    """Return True if no token is needed, or if the headers hold it or a cookie for it. `headers`: lower-case names."""
    needed = token()
    if needed is None:
        return True
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    if scheme.lower() in _SCHEMES and _equal(credential.strip(), needed):
        return True
    pairs = (pair.partition("=") for pair in headers.get("cookie", "").split(";"))
    return any(name.strip() == COOKIE and _is_valid(value.strip()) for name, _, value in pairs)


def query_without_token(query: str) -> tuple[bool | None, str]:
    """Return whether a query string holds this server's token (None: it holds no token at all), and the query string
    without tokens."""
    pairs = parse_qsl(query, keep_blank_values=True)
    needed, values = token() or "", [value for name, value in pairs if name == PARAMETER]
    right = any(_equal(value, needed) for value in values) if values and needed else None
    return right, urlencode([pair for pair in pairs if pair[0] != PARAMETER])


def new_cookie(secure: bool) -> str:
    """Return the value of a Set-Cookie header. `secure`: the browser came by https."""
    issued = str(int(time.time()))
    attributes = f"Max-Age={COOKIE_DAYS * 86400}; Path=/; HttpOnly; SameSite=Lax"
    return f"{COOKIE}={issued}.{_signature(issued)}; {attributes}{'; Secure' if secure else ''}"


def _is_valid(value: str) -> bool:
    issued, _, signature = value.partition(".")
    if not (issued.isascii() and issued.isdecimal()) or not _equal(signature, _signature(issued)):
        return False
    return 0 <= time.time() - int(issued) + 60 <= COOKIE_DAYS * 86400 + 60


def _signature(issued: str) -> str:
    return hmac.new(_key(), f"{COOKIE} {issued}".encode(), hashlib.sha256).hexdigest()


def _equal(text: str, needed: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "replace"), needed.encode())


def key_file() -> Path:
    """Return the file of the key that signs cookies."""
    return cache_dir() / "door.key"


@cache
def _key() -> bytes:
    """Return the user's key, made where it is missing; a key of this process alone where it cannot be kept."""
    path = key_file()
    with contextlib.suppress(OSError):
        if (key := _read_key(path)) is not None:
            return key
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        write_file(temporary, secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # another server made one meanwhile
            os.link(temporary, path)
        temporary.unlink()
        if (key := _read_key(path)) is not None:
            return key
    return secrets.token_bytes(_KEY_BYTES)


def _read_key(path: Path) -> bytes | None:
    """Return the key in the file; None unless it is this user's own file that nobody else may read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        key = file.read(_KEY_BYTES + 1)
    return key if about.st_uid == os.getuid() and not about.st_mode & 0o077 and len(key) == _KEY_BYTES else None
