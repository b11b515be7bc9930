"""The audit log: who did what with the encrypted data, and what was rejected; docs/audit.md.

The log consists of audit records.  Each is one line of JSON, which the logger
`adk_secure_sessions.audit` writes with level INFO.  No audit record contains a key, a state or the
content of an event.  Ids of users and sessions are hashed, unless a service was created with
`audit_accesses="readable"`.
"""

import getpass
import inspect
import json
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache, partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TextIO, TypeVar

from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.loops import bound
from adk_secure_sessions.telemetry import count_rejected, measured

P = ParamSpec("P")
T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)
if logger.level == logging.NOTSET:  # the application has not configured the logger before
    # Otherwise, a root logger with the level INFO would switch the audit log on.
    logger.setLevel(logging.WARNING)

audit_actor: ContextVar[str | None] = ContextVar("audit_actor", default=None)
"""The person or system on whose behalf the current task runs, for the audit log.

The application sets it, for example in the middleware that authenticates a request.
"""

# The facts that the running command adds to its audit record; None if no command runs.
_facts: ContextVar[dict[str, object] | None] = ContextVar("audit_facts", default=None)


def is_on() -> bool:
    """Return whether the logger of the audit log is enabled."""
    return logger.isEnabledFor(logging.INFO)


class _File(logging.StreamHandler[TextIO]):
    """Appends the records to a file, and raises the error if a record cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        raise  # the error that `emit` handles


def open_file(path: str) -> TextIO:
    """Open the file at *path* to append records; a new file gets mode 0600.  May raise OSError."""
    opener = partial(os.open, mode=0o600)
    return open(path, "a", encoding="utf-8", opener=opener)


@contextmanager
def appending_to(file: TextIO | None) -> Iterator[None]:
    """Append the audit log to *file* during the block, and then close *file*; None for no log.

    If a record cannot be written, the recorded call raises OSError.
    """
    if file is None:
        yield
        return
    handler = _File(file)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        with suppress(OSError):  # the record that could not be written has raised this error
            file.close()
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def record(event: str, **facts: object) -> None:
    """Write one record of the audit log.

    Args:
        event: What happened, for example `record.rejected`.
        **facts: Values for JSON, without plaintext and keys.  None values are omitted.
    """
    if not is_on():
        return
    actor = audit_actor.get()
    entry: dict[str, object] = {
        "time": datetime.now(UTC).isoformat(timespec="microseconds"),
        "event": event,
        "actor": None if actor is None else str(actor),  # the application may have set any object
        "process": os.getpid(),
        **{name: value for name, value in facts.items() if value is not None},
    }
    # The attribute `audit` contains the same facts, for log handlers that do not parse the message.
    logger.info("%s", json.dumps(entry), extra={"audit": entry})


def record_rejected(error: DecryptionError, *, on_replica: bool = False) -> None:
    """Count a stored value that was rejected with *error*, and write an audit record of it.

    *on_replica* says that a replica has returned the value, and that the primary was then asked.
    """
    count_rejected(error)
    record(
        "record.rejected",
        table=error.table,
        row=error.row,
        reason=str(error.reason),
        error=type(error).__name__,
        replica=on_replica or None,
    )


def record_opened(database_id: bytes | None, error: str | None) -> None:
    """Write an audit record: this process has opened a database, or could not open it.

    Args:
        database_id: The id of the database; None if it could not be opened.
        error: The name of the error's class; None if the database was opened.
    """
    database = database_id.hex() if database_id else None
    outcome = "failure" if error else "success"
    record("database.opened", database=database, account=account(), outcome=outcome, error=error)


def record_new_key(database_id: bytes, kind: str, key_id: int, **facts: object) -> None:
    """Write an audit record of a new key, after the key was stored.

    *kind* is `data key`, `data master` or `index master`.
    """
    record("key.created", database=database_id.hex(), kind=kind, key=key_id, **facts)


@cache
def account() -> str | None:
    """Return the name of the operating system's account that runs this process, if it has one."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None


def add_facts(**facts: object) -> None:
    """Add *facts* to the audit record of the command that runs in this task."""
    if (known := _facts.get()) is not None:
        known.update(facts)


def command(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate the function of a command: measure each call, and write an audit record at its end.

    The audit record contains the numbers and booleans in the function's result (a named tuple), and
    the facts that were passed to `add_facts`.
    """

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        facts: dict[str, object] = {"command": function.__name__, "account": account()}
        if kwargs.get("dry_run"):
            facts["dry_run"] = True
        try:
            with bound(_facts, facts):
                result = await function(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, DecryptionError):
                record_rejected(error)
            record("command", **facts, outcome="failure", error=type(error).__name__)
            raise
        record("command", **facts, outcome="success", result=_numbers(result))
        return result

    return measured(call)


def _numbers(result: object) -> dict[str, object] | None:
    """Return the fields of *result* that are integers or booleans; None if there are none.

    An object that is not a named tuple has no fields.
    """
    fields: dict[str, object] = getattr(result, "_asdict", dict)()
    return {name: value for name, value in fields.items() if isinstance(value, int)} or None


# --- Accesses -------------------------------------------------------------------------------------

# A function that converts an app name, a user id and a session id to the facts of an audit record.
# The function must not wait for the database: a record is also written for an operation that was
# cancelled, whose coroutine must end at once.
ReadIds = Callable[[str, str, str], dict[str, object]]

# The service whose calls in this task need no records, because the method that calls the service
# writes the record (the argument `covers` of `accessed`).
_covered: ContextVar[object] = ContextVar("audit_covered", default=None)


class Audited(Protocol):
    """A service whose accesses can be recorded."""

    @property
    def _access_ids(self) -> ReadIds | None:
        """A function that converts ids to the form that audit records show.

        None if accesses are not recorded.
        """
        ...


A = TypeVar("A", bound=Audited)


def accessed(
    action: str, covers: Callable[[Any], object] | None = None
) -> Callable[
    [Callable[Concatenate[A, P], Awaitable[T]]], Callable[Concatenate[A, P], Coroutine[Any, Any, T]]
]:
    """Decorate a method of a service: measure each call, and write an audit record of it.

    If `_access_ids` of the service is None, only rejected values are recorded.

    Args:
        action: The event in the audit record, for example `session.read`.
        covers: Returns another service that the method calls.  Only the outer call is recorded,
            because the inner call does not have the outcome.  Only the inner call is measured.
    """

    def decorate(
        method: Callable[Concatenate[A, P], Awaitable[T]],
    ) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
        signature = inspect.signature(method)

        async def recorded(service: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
            read_ids = service._access_ids
            if read_ids is not None and not is_on():
                _warn_that_it_is_off()
                read_ids = None
            ids = ("", "", "")
            if read_ids is not None:
                ids = _ids_of(signature.bind(service, *args, **kwargs).arguments)
            try:
                result = await method(service, *args, **kwargs)
            except BaseException as error:
                if isinstance(error, DecryptionError):
                    record_rejected(error)
                if read_ids is not None:
                    record(action, **read_ids(*ids), outcome="failure", error=type(error).__name__)
                raise
            if read_ids is None:
                return result
            if not ids[2]:  # the service has chosen the id of a new session
                ids = (*ids[:2], str(getattr(result, "id", "") or ""))
            found = "missing" if result is None and action.endswith(".read") else "success"
            record(action, **read_ids(*ids), outcome=found)
            return result

        @wraps(method)
        async def call(service: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if _covered.get() is service:
                return await method(service, *args, **kwargs)
            if covers is None:
                return await recorded(service, *args, **kwargs)
            with bound(_covered, covers(service)):
                return await recorded(service, *args, **kwargs)

        return measured(call) if covers is None else call

    return decorate


@cache
def _warn_that_it_is_off() -> None:
    """Log a warning, once in this process, that accesses are not recorded."""
    # This is not a record of the audit log, whose messages are JSON.
    logger = logging.getLogger("adk_secure_sessions")
    logger.warning(
        "audit_accesses is set, but no access is recorded: switch the logger "
        "adk_secure_sessions.audit on with setLevel(logging.INFO)"
    )


def _ids_of(arguments: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the app name, the user id and the session id among the arguments of a call.

    An id that is not among the arguments is empty.
    """
    session = arguments.get("session")
    if session is not None:
        return session.app_name, session.user_id, session.id
    app, user = arguments.get("app_name"), arguments.get("user_id")
    return str(app or ""), str(user or ""), str(arguments.get("session_id") or "")
