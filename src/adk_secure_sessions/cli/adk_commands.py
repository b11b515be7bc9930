"""Run the commands of google-adk that store sessions, with our services and without plaintext."""

import asyncio
import contextlib
import copy
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import click

from adk_secure_sessions.cli.config import PREFIX
from adk_secure_sessions.cli.program import Failure, main, one_line_errors
from adk_secure_sessions.errors import SecureSessionError
from adk_secure_sessions.integrations.plaintext_leaks import EXPORTER, LEAK_CHECKS, PLAINTEXT_KINDS

if TYPE_CHECKING:
    from adk_secure_sessions.service import EncryptedSessionService

# The commands of google-adk that are run here, and the help of each.
_ADK_COMMANDS = {
    "api_server": "Serve agents over HTTP (google-adk's command).",
    "run": "Run an agent in the terminal (google-adk's command).",
    "web": "Serve agents with a web page (google-adk's command).",
}
URI_VARIABLE = f"{PREFIX}URI"
# Matches, in a URL: user ids, session ids and names of artifacts, all of which may contain slashes,
# and the query string.
_IDS = re.compile(
    r"(?<=/)(users?/)[^?\s]+?(?=/(?:sessions|memory)\b|[?\s]|$)"
    r"|(?<=/)(sessions?/)[^?\s]+?(?=/artifacts\b|[?\s]|$)"
    r"|(?<=/)(artifacts/)[^?\s]+"
    r"|(\?)\S+",
    re.IGNORECASE,
)
# Matches a placeholder, such as %s, in the text of a log record.
_PLACEHOLDER = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
# Matches the words before a placeholder for an id or the name of a file.
_BEFORE_ID = re.compile(
    r"\b(?:artifact|file|session|user)(?: created| id| name| version for)?[ =:]*[\"'`]?$",
    re.IGNORECASE,
)


class AdkCommand(click.Command):
    """A command of google-adk, which is imported when the command is used: this takes seconds."""

    def make_context(self, info_name: str | None, *args: Any, **extra: Any) -> click.Context:
        from google.adk.cli.cli_tools_click import main as adk

        command = adk.commands.get(str(self.name))
        if command is None:
            text = f"the installed google-adk has no command {self.name}"
            raise Failure(text, "ConfigurationError")
        return _guarded(command).make_context(info_name, *args, **extra)


@main.group()
def adk() -> None:
    """Run google-adk's commands so that they store sessions, artifacts and memory encrypted.

    A command does not start if its options, its environment variables, or services of
    services.yaml and services.py would write user content as plaintext. It does not check what your
    agents and their plugins write: adk doctor finds plugins of google-adk.
    """


for _name, _help in _ADK_COMMANDS.items():
    adk.add_command(AdkCommand(_name, help=_help))


def names_among(known: Collection[str]) -> Callable[[str], set[str]]:
    """Return a function that converts names of *known*, separated by commas, to a set."""

    def convert(given: str) -> set[str]:
        names = {name.strip() for name in given.split(",")} - {""}
        if unknown := sorted(names - set(known)):
            raise click.BadParameter(f"{unknown[0]} is not one of {', '.join(known)}")
        return names

    return convert


def _guarded(command: click.Command) -> click.Command:
    """Return a copy of google-adk's *command* that stores no plaintext without permission.

    Before the copy runs, `_prepare` checks the arguments.  The copy has two more options:
    --service_uri, and --allow-plaintext, which names what may be stored as plaintext.
    """
    guarded = copy.copy(command)
    service_uri = click.Option(
        ["--service_uri"],
        metavar="URI",
        envvar=URI_VARIABLE,
        show_envvar=True,
        help="The URI for sessions, artifacts and memory that have no URI of their own, such as "
        "'encrypted+sqlite:///./sessions.db?key=env:ADK_SESSIONS_KEY&blobs=./artifacts'.",
    )
    allow_plaintext = click.Option(
        ["--allow-plaintext"],
        metavar="KINDS",
        default="",
        type=names_among(PLAINTEXT_KINDS),
        help="What may be written as plaintext: sessions, artifacts, memory, evaluations, logs, "
        "plugins or traces, separated by commas.",
    )
    guarded.params = [service_uri, allow_plaintext, *map(_with_fewer_logs, command.params)]

    @click.pass_context
    def run_guarded(
        context: click.Context,
        /,
        service_uri: str | None,
        allow_plaintext: set[str],
        **arguments: Any,
    ) -> Any:
        with one_line_errors():
            _prepare(arguments, service_uri, allow_plaintext)
        context.params = arguments
        with _ending_quietly():
            return context.invoke(command.callback or (lambda **_: None), **arguments)

    guarded.callback = run_guarded
    return guarded


def _with_fewer_logs(parameter: click.Parameter) -> click.Parameter:
    """Change the default of --log_level to WARNING: google-adk's INFO logs quote ids and events."""
    if parameter.name != "log_level":
        return parameter
    copied = copy.copy(parameter)
    copied.default = "WARNING"
    if isinstance(copied, click.Option):
        copied.help = "The level of logs; INFO and DEBUG quote ids and events.  [default: WARNING]"
    return copied


def _prepare(arguments: dict[str, Any], service_uri: str | None, allowed: set[str]) -> None:
    """Check that nothing would be stored as plaintext; then register and open our services.

    Unless the option --in_memory is given, set the URI of each service that has none in *arguments*
    to *service_uri*.  If *service_uri* is None, only the memory gets a URI: `memory://`, unless
    "memory" is in *allowed*.
    """
    from google.adk.cli.service_registry import get_service_registry

    from adk_secure_sessions.integrations import adk, plaintext_guard

    for kind in plaintext_guard.SERVICES if not arguments.get("in_memory") else ():
        if plaintext_guard.uri_of(kind, arguments) is None:
            # Without a URI, environment variables may decide where google-adk stores memories.
            default = "memory://" if kind == "memory" and kind not in allowed else None
            uri = service_uri if service_uri is not None else default
            if uri is not None:
                arguments[plaintext_guard.URI_ARGUMENTS[kind][0]] = uri
    causes = plaintext_guard.plaintext_causes(arguments, os.environ)
    if refused := {kind: cause for kind, cause in causes.items() if kind not in allowed}:
        raise Failure(plaintext_guard.rejection_text(refused), "PlaintextRefusedError")
    adk.register()
    plaintext_guard.guard_registry(get_service_registry(), allowed)
    _hide_ids_in_logs()
    uris = [plaintext_guard.uri_of(kind, arguments) for kind in plaintext_guard.SERVICES]
    encrypted_uris = [uri for uri in uris if uri and uri.partition("://")[0].lower() in adk.SCHEMES]
    for service in dict.fromkeys(map(adk.session_service, encrypted_uris)):
        asyncio.run(_open(service))
    if "traces" not in allowed:
        _ignore_trace_variables()
    _guard_server(rejects_evaluations="evaluations" not in allowed)


async def _open(service: "EncryptedSessionService") -> None:
    """Open the database of *service* once, to report a wrong key before google-adk starts."""
    async with service:  # closed at the end: the server's event loop opens the database again
        await service.prepare_tables()


def _hide_ids_in_logs() -> None:
    """Mask ids and names of artifacts in the logs of google-adk, and in the URLs of uvicorn's logs.

    google-adk has a logger for each module, and a filter applies to one logger only.  So change the
    function that creates the records of all loggers.
    """
    create = logging.getLogRecordFactory()

    def create_without_ids(*values: Any, **options: Any) -> logging.LogRecord:
        record = create(*values, **options)
        if not isinstance(record.args, tuple):
            pass
        elif record.name.startswith("google_adk"):
            record.args = _without_ids(str(record.msg), record.args)
        elif record.name in ("uvicorn.access", "uvicorn.error"):  # WebSockets log to the latter
            record.args = tuple(
                _IDS.sub(r"\1\2\3\4...", value) if isinstance(value, str) else value
                for value in record.args
            )
        return record

    logging.setLogRecordFactory(create_without_ids)


def _without_ids(text: str, values: tuple[object, ...]) -> tuple[object, ...]:
    """Replace those of *values* that may be ids or names of files by `...`.

    *values* are the arguments of a log record, and *text* is its text.  A value is replaced if its
    placeholder is %s or %r and follows a word such as "artifact".
    """
    matches = [match for match in _PLACEHOLDER.finditer(text) if match[0] != "%%"]
    if len(matches) != len(values):  # an unusual placeholder, such as %*d
        return values
    return tuple(
        "..." if match[0][-1] in "rs" and _BEFORE_ID.search(text[: match.start()]) else value
        for match, value in zip(matches, values, strict=True)
    )


def _ignore_trace_variables() -> None:
    """Make google-adk ignore variables in `.env` files that would make it send traces.

    google-adk loads the `.env` files of agents later.  A `.env` file does not replace a variable
    that is already set, and google-adk ignores an empty variable.
    """
    os.environ.update(dict.fromkeys(LEAK_CHECKS[EXPORTER].variables, ""))


def _guard_server(*, rejects_evaluations: bool) -> None:
    """Make uvicorn's servers answer an id that exceeds a limit with status 400, not 500.

    With *rejects_evaluations*, they also reject requests that write evaluations.  All releases of
    google-adk pass their application to `uvicorn.Config`, so this function patches that class.
    """
    import uvicorn
    from google.adk.errors.input_validation_error import InputValidationError
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse

    from adk_secure_sessions.integrations.plaintext_guard import without_evaluations

    create = uvicorn.Config.__init__

    def answer(_request: object, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    def create_guarded(config: uvicorn.Config, app: Any, *values: Any, **options: Any) -> None:
        if isinstance(app, Starlette):  # an agent may serve another kind
            app.add_exception_handler(InputValidationError, answer)
        guarded = without_evaluations(app) if rejects_evaluations else app
        create(config, guarded, *values, **options)

    setattr(uvicorn.Config, "__init__", create_guarded)  # noqa: B010


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """Report errors in one line; after Ctrl-C or the end of input, exit with status 130."""
    try:
        yield
    except (KeyboardInterrupt, EOFError):
        click.echo()
        sys.exit(130)
    except SecureSessionError:
        with one_line_errors():
            raise
