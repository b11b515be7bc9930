"""Detect services and settings of google-adk that would store user content as plaintext.

`plaintext_causes` checks options and the environment, `guard_registry` each service that google-adk
creates, and `without_evaluations` each request to its server.  `find_stores` is for `adk doctor`.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from google.adk.artifacts import InMemoryArtifactService
from google.adk.cli.service_registry import get_service_registry, load_services_module
from google.adk.memory import InMemoryMemoryService
from google.adk.sessions import InMemorySessionService
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from adk_secure_sessions.concurrency import context_value
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.integrations import adk
from adk_secure_sessions.integrations.plaintext_leaks import (
    EXPORTER,
    PLUGINS,
    Protection,
    ServiceStore,
    variables_set,
)

# For each service, the arguments of google-adk's commands that take its URI.  Releases before 2.0
# also have the second name of each pair.
URI_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "sessions": ("session_service_uri", "session_db_url"),
    "artifacts": ("artifact_service_uri", "artifact_storage_uri"),
    "memory": ("memory_service_uri",),
}
SERVICES = tuple(URI_ARGUMENTS)
# The arguments that make google-adk store or send user content as plaintext if they are given.
_WRITES_PLAINTEXT = {
    "save_session": "sessions",
    "eval_storage_uri": "evaluations",
    "trace_to_cloud": "traces",
    "otel_to_cloud": "traces",
    "verbose": "logs",
}
# The first matches the paths of google-adk's routes for evaluations and tests, in all releases.
# The second matches names and ids, which may contain the same words.
_EVALUATIONS = re.compile(r"/(?:eval|tests)", re.IGNORECASE)
_IDS_IN_PATH = re.compile(r"/apps?/[^/]+(?:/users/[^/]+(?:/sessions/[^/]+(?:/artifacts/.*)?)?)?")
# This environment variable names the service for sessions and memories without a URI.
_AGENT_ENGINE = "GOOGLE_CLOUD_AGENT_ENGINE_ID"
# The schemes of google-adk's services that store plaintext.
_PLAINTEXT_SCHEMES = {
    "agentengine", "file", "gs", "mariadb", "mysql", "postgresql", "rag", "sqlite",
}  # fmt: skip


def uri_of(kind: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the URI that a command's *arguments* give for *kind*; None if there is none."""
    return next((arguments[name] for name in URI_ARGUMENTS[kind] if arguments.get(name)), None)


def plaintext_causes(
    arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return which of `PLAINTEXT_KINDS` a command would write as plaintext, each with the cause."""
    found: dict[str, str] = {}
    for name, kind in _WRITES_PLAINTEXT.items():
        if arguments.get(name):
            found[kind] = f"--{name}"
    if str(arguments.get("log_level")).upper() in ("DEBUG", "INFO"):
        found["logs"] = f"--log_level {arguments['log_level']}"
    for plugin in ",".join(arguments.get("extra_plugins") or ()).split(","):
        if plugin.strip().rpartition(".")[2] in PLUGINS:
            found["plugins"] = f"--extra_plugins {plugin.strip()}"
    for name in variables_set(EXPORTER, environment):
        found["traces"] = f"the environment variable {name}: unset it"
    for kind in SERVICES if not arguments.get("in_memory") else ():
        uri = uri_of(kind, arguments)
        option = f"--{URI_ARGUMENTS[kind][0]}"
        scheme = _scheme_of(uri, option) if uri is not None else None
        if scheme is None and kind != "artifacts" and environment.get(_AGENT_ENGINE):
            found[kind] = f"no {option}, and {_AGENT_ENGINE} is set"
        elif scheme is None and kind != "memory":  # otherwise, memories are not stored
            found[kind] = f"no {option}, so in .adk"
        elif uri is not None and scheme in adk.SCHEMES:
            if adk.parse(uri).stores_plaintext:
                found[kind] = f"{option} has backend=no-op"
        elif scheme is not None and scheme.partition("+")[0] in _PLAINTEXT_SCHEMES:
            found[kind] = f"{option} {scheme}://..."
    return found


def _scheme_of(uri: str, option: str) -> str:
    try:
        return urlsplit(uri).scheme
    except ValueError:  # its text may quote the password
        pass
    raise ConfigurationError(
        f"the URI of {option} cannot be parsed: write special characters, such as [, as %5B"
    )


def rejection_text(found: Mapping[str, str]) -> str:
    """Return the text of an error for *found*, elements of `PLAINTEXT_KINDS` with the cause."""
    text = ", ".join(f"{kind} ({where})" for kind, where in found.items())
    uri = (
        "--service_uri (ADK_SECURE_SESSIONS_URI) encrypted+..., or memory:// to store nothing, or "
    )
    # Without a URI, google-adk would store sessions in `.adk`, so leaving out does not help.
    leave = "" if found.keys() <= set(SERVICES) else "leave it out, or "
    return (
        f"google-adk would write this as plaintext: {text}; {leave}give "
        f"{uri if found.keys() & set(SERVICES) else ''}--allow-plaintext {','.join(found)}"
    )


def guard_registry(registry: Any, allowed: Collection[str]) -> None:
    """Make *registry* reject services that store plaintext, unless their kind is *allowed*."""
    for kind in SERVICES:
        name = _registry_method(kind)
        if kind not in allowed:
            setattr(registry, name, partial(_create_checked, kind, getattr(registry, name)))


def _registry_method(kind: str) -> str:
    """Return the name of the method of google-adk's registry that creates a service."""
    return f"create_{URI_ARGUMENTS[kind][0].removesuffix('_uri')}"


def _create_checked(kind: str, create: Callable[..., Any], uri: str, **options: Any) -> Any:
    """Create a service; reject plaintext and None: google-adk would use a database of its own."""
    service = create(uri, **options)
    option = URI_ARGUMENTS[kind][0]
    if service is None:
        raise ConfigurationError(
            f"nothing is registered for the scheme of --{option} (by default, --service_uri or "
            "ADK_SECURE_SESSIONS_URI): if services.yaml or services.py registers it, see "
            "google-adk's warning above"
        )
    if protection_of(service) == Protection.PLAINTEXT:
        raise ConfigurationError(
            rejection_text({kind: f"--{option} makes a {type(service).__name__}"})
        )
    return service


def protection_of(service: object) -> Protection:
    """Return what *service* stores; without the property `stores_plaintext`, it is plaintext."""
    if type(service) in (InMemoryArtifactService, InMemoryMemoryService, InMemorySessionService):
        return Protection.NOTHING
    is_encrypted = getattr(service, "stores_plaintext", True) is False
    return Protection.ENCRYPTED if is_encrypted else Protection.PLAINTEXT


def find_stores(agents_dir: str, arguments: Mapping[str, Any]) -> Iterator[ServiceStore]:
    """Yield the store of each service, after loading `services.yaml` and `services.py`."""
    adk.register()  # as `adk-secure-sessions adk` does
    load_services_module(agents_dir)
    found = plaintext_causes(arguments, os.environ)
    for kind in SERVICES:
        if kind in found:
            yield ServiceStore(kind, Protection.PLAINTEXT, found[kind])
        elif uri := uri_of(kind, arguments):
            create = getattr(get_service_registry(), _registry_method(kind))
            yield ServiceStore(kind, *_probe(uri, partial(create, agents_dir=agents_dir)))
        else:
            yield ServiceStore(kind, Protection.NOTHING, "no URI: memory of the process")


def _probe(uri: str, create: Callable[[str], Any]) -> tuple[Protection, str]:
    """Return what the service that *create* makes for *uri* stores, and where."""
    scheme = urlsplit(uri).scheme
    try:
        with context_value(adk.parses_only, True):
            service = create(uri)
    except Exception as error:  # any error of the application's code, whose text may quote the URI
        reason = f": {error}" if isinstance(error, SecureSessionError) else ""
        return Protection.UNKNOWN, f"{scheme}:// raises {type(error).__name__}{reason}"
    if service is None:
        return Protection.UNKNOWN, f"{scheme}:// is not registered"
    made = "" if isinstance(service, adk.ServiceUri) else f" makes a {type(service).__name__}"
    return protection_of(service), f"{scheme}://{made}"


def without_evaluations(application: ASGIApp) -> ASGIApp:
    """Return an ASGI application that passes on requests, except writes of evaluations."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        writes = scope["type"] == "http" and scope["method"] != "GET"
        if not writes or not _EVALUATIONS.search(_IDS_IN_PATH.sub("", scope["path"])):
            await application(scope, receive, send)
            return
        text = (
            "google-adk would write this as plaintext: evaluations; to permit it, start the "
            "command with --allow-plaintext evaluations"
        )
        await JSONResponse({"detail": text}, 403)(scope, receive, send)

    return guarded
