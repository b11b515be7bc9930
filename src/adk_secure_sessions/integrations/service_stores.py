"""Find where google-adk's commands would store sessions, artifacts and memory.

google-adk chooses a service by the scheme of its URI.  `services.yaml` and `services.py` in the
directory of the agents may register further schemes, or replace ours.  `find_stores` loads these
files as google-adk does, and asks the registry for the service of each URI.  It does not create our
own services, because that would need the root key.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from adk_secure_sessions.integrations import adk
from adk_secure_sessions.integrations.plaintext_guard import (
    PLAINTEXT_SCHEMES,
    SERVICES,
    is_encrypted,
    is_in_memory,
)

ENCRYPTED, PLAINTEXT, NOTHING, UNKNOWN = "encrypted", "plaintext", "nothing", "unknown"
_SINGULAR = dict(zip(SERVICES, ("session", "artifact", "memory"), strict=True))
_OURS = (adk.session_service, adk.artifact_service, adk.memory_service)
_REGISTRY_LOGGER = "google_adk.google.adk.cli.service_registry"
_Factory = Callable[..., Any]


class ServiceStore(NamedTuple):
    """Where a command of google-adk would store the data of one service.

    Attributes:
        service: `sessions`, `artifacts` or `memory`.
        stores: `encrypted`, `plaintext`, `nothing` (in the memory of the process), or `unknown` if
            the service cannot be created.
        where: The scheme of the URI, or the default of google-adk.
    """

    service: str
    stores: str
    where: str


def find_stores(
    agents_dir: str | os.PathLike[str], uris: Mapping[str, str | None]
) -> tuple[list[ServiceStore], list[str]]:
    """Return the store of each service, and warnings about `services.yaml` and `services.py`.

    Args:
        agents_dir: The directory of all agents, or of one agent.
        uris: For each element of `SERVICES`, the URI of the service; None if no URI is given.

    Raises:
        ConfigurationError: A URI for one of our services cannot be used.
    """
    from google.adk.cli.service_registry import get_service_registry, load_services_module

    registry = get_service_registry()
    adk.register()  # as `adk-secure-sessions adk` does
    with _registrations(registry) as registered, _warnings() as warnings:
        load_services_module(os.fspath(agents_dir))
    return [_store(registry, registered, kind, uris[kind], agents_dir) for kind in SERVICES], (
        warnings
    )


def _store(
    registry: Any,
    registered: Mapping[tuple[str, str], _Factory],
    kind: str,
    uri: str | None,
    agents_dir: str | os.PathLike[str],
) -> ServiceStore:
    if uri is None:
        if kind == "memory":
            return ServiceStore(kind, NOTHING, "no URI: memory of the process")
        return ServiceStore(kind, PLAINTEXT, f"no --{_SINGULAR[kind]}_service_uri: files in .adk")
    scheme = urlsplit(uri).scheme
    factory = registered.get((kind, scheme))
    if scheme in adk.SCHEMES and (factory is None or _is_ours(factory)):
        parsed = adk.parse(uri)
        if parsed.stores_plaintext:
            return ServiceStore(kind, PLAINTEXT, f"{scheme}:// with backend=no-op")
        if kind == "artifacts" and parsed.blobs is None:
            return ServiceStore(kind, UNKNOWN, f"{scheme}:// needs blobs=")
        return ServiceStore(kind, ENCRYPTED, f"{scheme}://")
    if factory is None and scheme in PLAINTEXT_SCHEMES:
        return ServiceStore(kind, PLAINTEXT, f"{scheme}://")
    create = getattr(registry, f"create_{_SINGULAR[kind]}_service")
    try:
        service = create(uri, agents_dir=os.fspath(agents_dir))
    except Exception as error:  # any error of the application's code; its text may quote the URI
        made = f"{scheme}:// raises {type(error).__name__}"
        return ServiceStore(kind, UNKNOWN, made)
    if service is None:
        return ServiceStore(kind, UNKNOWN, f"{scheme}:// is not registered")
    made = f"{scheme}:// makes a {type(service).__name__}"
    if is_in_memory(kind, service):
        return ServiceStore(kind, NOTHING, made)
    return ServiceStore(kind, ENCRYPTED if is_encrypted(kind, service) else PLAINTEXT, made)


def _is_ours(factory: _Factory) -> bool:
    """Return True if *factory* is one of our functions, or calls one of them.

    For an entry of `services.yaml`, google-adk registers a closure that calls the function.
    """
    cells = getattr(factory, "__closure__", None) or ()
    called = [factory, *(cell.cell_contents for cell in cells)]
    return any(one is ours for one in called for ours in _OURS)


@contextmanager
def _registrations(registry: Any) -> Iterator[dict[tuple[str, str], _Factory]]:
    """Record the functions that are registered during the block, by kind of service and scheme.

    The record tells whether `services.yaml` or `services.py` has replaced one of our functions.
    """
    found: dict[tuple[str, str], _Factory] = {}

    def recording(kind: str, register: Callable[[str, _Factory], None]) -> Any:
        def record(scheme: str, factory: _Factory) -> None:
            found[kind, scheme] = factory
            register(scheme, factory)

        return record

    names = {kind: f"register_{singular}_service" for kind, singular in _SINGULAR.items()}
    for kind, name in names.items():
        setattr(registry, name, recording(kind, getattr(registry, name)))
    try:
        yield found
    finally:
        for name in names.values():
            delattr(registry, name)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the first lines of google-adk's warnings about `services.yaml` and `services.py`."""
    found: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage().partition("\n")[0])

    logger, handler = logging.getLogger(_REGISTRY_LOGGER), Lines(logging.WARNING)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
