"""Detect services of google-adk that would store user content as plaintext.

google-adk may store plaintext by mistake.  Without a URI, it stores sessions and artifacts in files
in `.adk`.  If `services.py` raises an error, google-adk only logs a warning and continues.  Its
server copies sessions into eval sets and tests, which are files beside the agents.  So this module
has three checks.  `plaintext_stores` checks the options and the environment before google-adk
starts.  `guard_registry` checks each service that google-adk creates from a URI.
`WithoutEvaluations` checks each request to the server.
"""

import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from adk_secure_sessions.backends import NoOpBackend
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.integrations.adk import SCHEMES, parse

SERVICES = ("sessions", "artifacts", "memory")
KINDS = (*SERVICES, "evaluations", "traces")
# The arguments of google-adk's commands that take the URI of a service.  Releases before 2.0 also
# have the second name of each pair.
URI_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "sessions": ("session_service_uri", "session_db_url"),
    "artifacts": ("artifact_service_uri", "artifact_storage_uri"),
    "memory": ("memory_service_uri",),
}
# The arguments that make google-adk store or send user content as plaintext if they are given.
_WRITES_PLAINTEXT = {
    "save_session": "sessions",
    "eval_storage_uri": "evaluations",
    "trace_to_cloud": "traces",
    "otel_to_cloud": "traces",
}
# Environment variables that make google-adk send traces, which contain ids of sessions.  An empty
# variable has no effect.
TRACE_VARIABLES = tuple(
    f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT" for signal in ("", "TRACES_", "METRICS_", "LOGS_")
)
# Matches the paths of google-adk's routes for evaluations and tests, in all releases.
_EVALUATIONS = re.compile(r"/(?:eval|tests)", re.IGNORECASE)
IN_MEMORY = "memory"  # the scheme of google-adk's services that store nothing
# The schemes of google-adk's services that store plaintext.
PLAINTEXT_SCHEMES = {"agentengine", "file", "gs", "mysql", "postgresql", "rag", "sqlite"}
# The names of the classes that encrypt.  Importing the classes would need all extras.
_ENCRYPTS = {
    "sessions": {"EncryptedSessionService", "EncryptedSessionWrapper"},
    "artifacts": {"EncryptedArtifactService"},
    "memory": {"EncryptedMemoryService"},
}
_STORES_NOTHING = {
    "sessions": "InMemorySessionService",
    "artifacts": "InMemoryArtifactService",
    "memory": "InMemoryMemoryService",
}


def uri_of(kind: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the URI that a command's *arguments* give for *kind*; None if there is none."""
    return next((arguments[name] for name in URI_ARGUMENTS[kind] if arguments.get(name)), None)


def plaintext_stores(
    arguments: Mapping[str, Any],
    allowed: Collection[str],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Return the text of an error if google-adk would store plaintext; otherwise None.

    Args:
        arguments: The arguments of one of google-adk's commands, by name.
        allowed: The elements of `KINDS` that may be stored as plaintext.
        environment: The environment variables that google-adk will see.

    Raises:
        ConfigurationError: A URI for one of our services cannot be used.
    """
    found: dict[str, str] = {}
    for name, kind in _WRITES_PLAINTEXT.items():
        if arguments.get(name):
            found[kind] = f"{kind} (--{name})"
    for name in TRACE_VARIABLES:
        if environment.get(name):
            found["traces"] = f"traces (the environment variable {name}: unset it)"
    for kind in SERVICES if not arguments.get("in_memory") else ():
        uri = uri_of(kind, arguments)
        option = f"--{URI_ARGUMENTS[kind][0]}"
        scheme = urlsplit(uri).scheme if uri is not None else None
        if scheme is None and kind != "memory":  # without a URI, memories are not stored
            found[kind] = f"{kind} (no {option}, so in .adk)"
        elif uri is not None and scheme in SCHEMES:
            if parse(uri).stores_plaintext:
                found[kind] = f"{kind} ({option} has backend=no-op)"
        elif scheme in PLAINTEXT_SCHEMES:
            found[kind] = f"{kind} ({option} {scheme}://...)"
    stored = [text for kind, text in found.items() if kind not in allowed]
    if not stored:
        return None
    return _refusal(", ".join(stored), [kind for kind in found if kind not in allowed])


def guard_registry(registry: Any, allowed: Collection[str]) -> None:
    """Make *registry* reject every service that stores plaintext, unless its kind is *allowed*.

    The methods of *registry* then raise ConfigurationError for such a service.  They also raise
    this error if no service is registered for a URI, because google-adk would then create a
    `DatabaseSessionService`.
    """
    for kind, name in (
        ("sessions", "create_session_service"),
        ("artifacts", "create_artifact_service"),
        ("memory", "create_memory_service"),
    ):
        if kind not in allowed:
            setattr(registry, name, _checked(kind, getattr(registry, name)))


def _checked(kind: str, create: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls *create*, and rejects a service that stores plaintext."""

    def create_checked(uri: str, **options: Any) -> Any:
        service = create(uri, **options)
        if service is None:
            raise ConfigurationError(
                f"nothing is registered for the scheme of --{URI_ARGUMENTS[kind][0]}: if "
                "services.yaml or services.py registers it, see google-adk's warning above"
            )
        if not is_encrypted(kind, service):
            made = f"{kind} (--{URI_ARGUMENTS[kind][0]} makes a {type(service).__name__})"
            raise ConfigurationError(_refusal(made, [kind]))
        return service

    return create_checked


def is_encrypted(kind: str, service: object) -> bool:
    """Return True if *service* encrypts what it stores, or stores nothing."""
    for base in type(service).__mro__:
        package = base.__module__.split(".")[0]
        if package == "adk_secure_sessions" and base.__name__ in _ENCRYPTS[kind]:
            return not isinstance(getattr(service, "backend", None), NoOpBackend)
    return is_in_memory(kind, service)


def is_in_memory(kind: str, service: object) -> bool:
    """Return True if *service* is google-adk's service that stores nothing."""
    made = type(service)
    return made.__module__.startswith("google.adk.") and made.__name__ == _STORES_NOTHING[kind]


_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Application = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class WithoutEvaluations:
    """An ASGI application that passes requests to *application*, except writes of evaluations.

    A request is rejected if its method is not GET and its path contains `/eval` or `/tests`.  It is
    not rejected if only a parameter in the path contains these words, such as an agent's name.
    """

    def __init__(self, application: _Application) -> None:
        self._application = application

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET" or not self._rejects(scope):
            await self._application(scope, receive, send)
            return
        text = (
            "google-adk would store this as plaintext: evaluations; to permit it, start the "
            "command with --allow-plaintext evaluations"
        )
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"detail": text}).encode()})

    def _rejects(self, scope: _Message) -> bool:
        if not _EVALUATIONS.search(scope["path"]):
            return False
        from starlette.routing import Match, Route

        root_path = getattr(self._application, "root_path", "") or scope.get("root_path", "")
        scope = {**scope, "root_path": root_path}  # FastAPI does this before it finds the route
        for route in getattr(self._application, "routes", ()):
            if route.matches(scope)[0] is Match.FULL:
                return not isinstance(route, Route) or bool(_EVALUATIONS.search(route.path))
        return True


def _refusal(stored: str, kinds: Collection[str]) -> str:
    """Return the text of an error: *stored* describes the data, whose kinds are *kinds*."""
    return (
        f"google-adk would store this as plaintext: {stored}; give --service_uri encrypted+..., or "
        f"the URI memory:// to store nothing, or --allow-plaintext {','.join(kinds)}"
    )
