"""Encrypted services by URI, for google-adk's command line, `services.yaml` and `services.py`.

A URI is the URL of a database with `encrypted+` before it, and options after a question mark:
`encrypted+sqlite:///./sessions.db?key=env:ADK_SESSIONS_KEY`.  docs/adk-commands.md lists the
options.

Neither google-adk nor SQLAlchemy knows a scheme that begins with `encrypted+`.  So if `register`
was not called, both reject the URI instead of opening a service that stores plaintext.
"""

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from difflib import get_close_matches
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl, unquote

from adk_secure_sessions.audit import Audit
from adk_secure_sessions.backends.registry import DEFAULT, NAMES, NO_OP, backends_for
from adk_secure_sessions.caches import Caches
from adk_secure_sessions.concurrency import ThreadLock
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.records import COMPRESSIONS, PADDINGS, Packing
from adk_secure_sessions.formats.times import parse_age
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.integrations.memory import EncryptedMemoryService
from adk_secure_sessions.service import EncryptedSessionService

T = TypeVar("T")

PREFIX = "encrypted+"
# The kinds of URL that may follow the prefix, each with the driver's options that a URI may
# contain: `parse` rejects a misspelled option.
_POSTGRESQL = {
    "host",
    "port",
    "ssl",
    "sslmode",
    "target_session_attrs",
    "timeout",
    "command_timeout",
}
_MYSQL = {"charset", "connect_timeout", "ssl", "ssl_ca", "ssl_cert", "ssl_key", "unix_socket"}
_DRIVER_OPTIONS: dict[str, set[str]] = {
    "sqlite": {"timeout"},
    "sqlite+aiosqlite": {"timeout"},
    **dict.fromkeys(("postgresql", "postgresql+asyncpg"), _POSTGRESQL),
    "postgresql+psycopg": _POSTGRESQL | {"sslrootcert", "sslcert", "sslkey", "connect_timeout"},
    **dict.fromkeys(("mysql", "mysql+asyncmy", "mysql+aiomysql"), _MYSQL),
    **dict.fromkeys(("mariadb", "mariadb+asyncmy", "mariadb+aiomysql"), _MYSQL),
}
SCHEMES = tuple(PREFIX + url for url in _DRIVER_OPTIONS)


# A function that converts a text and returns None for a wrong one, and what the text must be.
_Conversion: TypeAlias = tuple[Callable[[str], Any], str]


def _one_of(*choices: str) -> _Conversion:
    known = {choice: choice for choice in choices}
    return known.get, f"can only be {' or '.join(choices)}"


_NAME = _one_of(*NAMES)
_TEXT: _Conversion = (lambda text: text or None, "has no value")
_AGE = "must be a number from 1 to 999999 and a unit: s, m, h, d or w, such as 90d"
# The options of this package.
_OPTIONS: dict[str, _Conversion] = {
    "key": _TEXT,
    "also_key": _TEXT,
    "backend": _NAME,
    "also_backend": _NAME,
    "key_db": _TEXT,
    "blobs": _TEXT,
    "allow_http": _one_of("true"),
    "audit_ids": _one_of("blind", "readable"),
    "audit_table": _one_of("true"),
    "cache_events": (
        lambda text: int(text) if re.fullmatch("[0-9]{1,18}", text) else None,
        "must be a number of bytes",
    ),
    "compression": _one_of(*COMPRESSIONS),
    "expires_after": (lambda text: parse_age(text) or None, _AGE),
    "indexed_state_key": _TEXT,
    "padding": _one_of(*PADDINGS),
}
_REPEATED = ("also_key", "also_backend", "indexed_state_key")  # the others: at most once
_EXAMPLE = "encrypted+sqlite:///./sessions.db?key=env:ADK_SESSIONS_KEY"
_EXIT_TIMEOUT = 5.0  # seconds to close the databases after SIGTERM; then the process ends anyway


class ServiceUri(NamedTuple):
    """The parts of a URI."""

    db_url: str
    backends: tuple[str, ...]  # names; the first one writes, and the others only decrypt
    keys: tuple[str, ...]  # key specs of the root keys; the first one wraps new master keys
    blobs: str | None  # the store for the contents of artifacts: a path, or the URL of a bucket
    allow_http: bool  # whether this store may be on another machine without TLS
    options: tuple[tuple[str, Any], ...]  # other arguments of `EncryptedSessionService`

    def __repr__(self) -> str:  # without the URLs, which may contain passwords
        return "<ServiceUri>"

    @property
    def stores_plaintext(self) -> bool:
        return self.backends[0] == NO_OP


@hides_locals
def parse(uri: str) -> ServiceUri:
    address, _, query = uri.partition("?")
    scheme, colon, rest = address.partition("://")
    if not colon or scheme.lower() not in SCHEMES:
        raise ConfigurationError(
            f"not a URI of an encrypted service: it begins with one of {', '.join(SCHEMES)}, "
            f"such as {_EXAMPLE}"
        )
    url = scheme.lower().removeprefix(PREFIX)
    ours: dict[str, list[Any]] = {name: [] for name in _OPTIONS}
    driver_options = []
    for number, option in enumerate(filter(None, query.split("&")), 1):
        name = unquote(option.partition("=")[0])
        if name in ours:
            convert, requirement = _OPTIONS[name]
            values = [convert(text) for _, text in parse_qsl(option, True)]
            if None in values:  # do not quote the text: it may be a key
                raise ConfigurationError(f"the option {name!r} of the URI {requirement}")
            ours[name] += values
        elif name in _DRIVER_OPTIONS[url]:
            driver_options.append(option)
        else:  # do not quote the name: a user may write a key there by mistake
            known = (*_OPTIONS, *sorted(_DRIVER_OPTIONS[url]))
            close = get_close_matches(name, known, 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigurationError(
                f"option {number} of the URI is unknown{meant}: there are {', '.join(known)}"
            )
        if len(ours.get(name, ())) > 1 and name not in _REPEATED:
            more = f": give older ones as also_{name}" if f"also_{name}" in _REPEATED else ""
            raise ConfigurationError(f"the URI has the option {name!r} more than once{more}")
    once = {name: values[0] if values else None for name, values in ours.items()}
    names = (once["backend"] or DEFAULT, *ours["also_backend"])
    if not ours["key"] and (names[0] != NO_OP or ours["also_key"]):
        raise ConfigurationError(
            f"the URI has no key: add a key spec that names the root key, as in {_EXAMPLE}"
        )
    if once["allow_http"] and not once["blobs"]:
        raise ConfigurationError("the option 'allow_http' of the URI needs blobs= with a bucket")
    audit = None
    if once["audit_ids"] or once["audit_table"]:
        audit = Audit(once["audit_ids"] or "blind", table=bool(once["audit_table"]))
    options = {
        "key_db_url": once["key_db"],
        "audit": audit,
        "cache": Caches(events=once["cache_events"] or 0),
        "indexed_state_keys": tuple(ours["indexed_state_key"]),
        "packing": Packing(once["compression"], once["padding"]),
        "expires_after": once["expires_after"],
    }
    return ServiceUri(
        f"{url}://{rest}" + (f"?{'&'.join(driver_options)}" if driver_options else ""),
        names,
        (*ours["key"], *ours["also_key"]),
        once["blobs"],
        bool(once["allow_http"]),
        tuple(options.items()),
    )


# --- The functions that google-adk calls ----------------------------------------------------------

# If True, the three functions below return the parsed `ServiceUri`, not a service, which needs no
# root key.  `adk doctor` thus learns whether google-adk would call them.
parses_only: ContextVar[bool] = ContextVar("parses_only", default=False)


def _service(parsed: ServiceUri, make: Callable[[EncryptedSessionService], T]) -> T:
    """Return what *make* makes of the session service, or *parsed* if `parses_only`."""
    return cast(T, parsed) if parses_only.get() else make(_shared_service(parsed))


@hides_locals
def session_service(uri: str, **options: object) -> EncryptedSessionService:
    """Return the session service for *uri*.

    Calls with the same options, except `blobs`, return the same service.  When the process ends,
    the service closes a SQLite database, even if SIGTERM ends the process.

    Args:
        uri: The URI; the module describes its form.
        options: Rejected, because all options are part of the URI.  Exception: `agents_dir` and
            `per_agent`, which google-adk passes to every service, have no effect.  A relative path
            in *uri* is relative to the current directory.

    Raises:
        ConfigurationError: The URI, or a key or a database that it names, cannot be used; or there
            are other options.
    """
    return _service(_parsed(uri, options), lambda sessions: sessions)


@hides_locals
def artifact_service(uri: str, **options: object) -> EncryptedArtifactService:
    """Return the artifact service for *uri*, whose option `blobs` says where contents are stored.

    The database of the sessions stores the names, versions and encryption keys of artifacts.  See
    `session_service` for the arguments and errors.
    """
    parsed = _parsed(uri, options)
    if (blobs := parsed.blobs) is None:
        raise ConfigurationError(
            "artifacts need a place for their contents: add blobs= to the URI, with a directory or "
            "the URL of a bucket, such as &blobs=./artifacts"
        )

    def make(sessions: EncryptedSessionService) -> EncryptedArtifactService:
        store = ArtifactStore(blobs, allow_http=parsed.allow_http)
        return EncryptedArtifactService(sessions, store)

    return _service(parsed, make)


@hides_locals
def memory_service(uri: str, **options: object) -> EncryptedMemoryService:
    """Return the memory service for *uri*, which stores memories in the database of the sessions.

    See `session_service` for the arguments and errors.
    """
    return _service(_parsed(uri, options), EncryptedMemoryService)


def _parsed(uri: str, options: Mapping[str, object]) -> ServiceUri:
    if unknown := options.keys() - {"agents_dir", "per_agent"}:
        raise ConfigurationError(
            f"{', '.join(sorted(unknown))}: options of an encrypted service are part of its URI"
        )
    return parse(uri)


@hides_locals
def register() -> None:
    """Register our services for all `SCHEMES` in google-adk; call this in `services.py`."""
    from google.adk.cli.service_registry import get_service_registry

    registry = get_service_registry()
    for scheme in SCHEMES:
        registry.register_session_service(scheme, session_service)
        registry.register_artifact_service(scheme, artifact_service)
        registry.register_memory_service(scheme, memory_service)


# --- One service for each database ----------------------------------------------------------------

_services: dict[ServiceUri, EncryptedSessionService] = {}
_lock = ThreadLock()


def _shared_service(uri: ServiceUri) -> EncryptedSessionService:
    key = uri._replace(blobs=None, allow_http=False)
    with _lock.lock:
        if key not in _services:
            backend, additional = backends_for(uri.backends, uri.keys)
            service = EncryptedSessionService(uri.db_url, backend, additional, **dict(uri.options))
            _close_on_sigterm()
            _services[key] = service
        return _services[key]


def _close_on_sigterm() -> None:
    """Make SIGTERM close the databases before it ends the process, unless it has a handler.

    uvicorn handles SIGTERM while it serves, then restores the previous handler and sends SIGTERM
    again.  The default handler would leave `-wal` files behind.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can set handlers
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    process = os.getpid()

    def close_and_end(number: int, _frame: FrameType | None) -> None:
        # A forked child inherits this handler.  The child must not close the connections, because
        # they belong to the parent.
        if os.getpid() == process:
            # An event loop may be running in this thread, which cannot run a second event loop.
            thread = threading.Thread(target=asyncio.run, args=(_close_files(),), daemon=True)
            thread.start()
            thread.join(_EXIT_TIMEOUT)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, close_and_end)


async def _close_files() -> None:
    """Close the services of SQLite databases: a server notices when the process ends."""
    for key, service in list(_services.items()):
        if key.db_url.startswith("sqlite"):
            await service.close()
