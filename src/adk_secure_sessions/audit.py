"""The audit log: who did what with the encrypted data, and what was rejected; docs/audit.md.

The log consists of audit records.  Each is one line of JSON, which the logger
`adk_secure_sessions.audit` writes with level INFO.  No audit record contains a key, a state or the
content of an event.  Ids of users and sessions are hashed, unless a service was created with
`Audit("readable")`.

If a service was created with `Audit(table=True)`, its records are also stored in the database: see
`storage.features.audit_trail`.  The context variable `_call` then says what the running call has to
store.
"""

import getpass
import inspect
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TextIO, TypeVar

from adk_secure_sessions.errors import ConfigurationError, DecryptionError
from adk_secure_sessions.loops import bound
from adk_secure_sessions.results import Result
from adk_secure_sessions.telemetry import count_rejected, measuring
from adk_secure_sessions.tracebacks import hides_locals, starting

P = ParamSpec("P")
T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The maximum number of records that one call keeps for the audit trail.
_MOST_KEPT = 1000

logger: logging.Logger = logging.getLogger(__name__)
if logger.level == logging.NOTSET:  # the application has not configured the logger before
    # Otherwise, a root logger with the level INFO would switch the audit log on.
    logger.setLevel(logging.WARNING)


@hides_locals
@dataclass(frozen=True)
class Audit:
    """How a service records each access in the audit log (docs/audit.md).

    The services for artifacts and memory that use the service record their accesses alike.

    Args:
        ids: Whether records contain keyed hashes of the ids (`blind`), or the ids themselves
            (`readable`).
        table: Also store the records in the database, in the table `secure_audit`.  The record of a
            change is stored in the transaction of the change.  If a record cannot be stored, the
            call raises `DatabaseError`.

    Raises:
        ConfigurationError: *ids* has another value.
    """

    ids: Literal["blind", "readable"] = "blind"
    table: bool = False

    def __post_init__(self) -> None:
        if self.ids not in ("blind", "readable"):
            raise ConfigurationError('ids of Audit must be "blind" or "readable"')


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


class AuditEntry(NamedTuple):
    """A record of the audit log, before it is written.

    Attributes:
        time: When the record was made, in microseconds since 1970, UTC.
        fields: Values for JSON, among them the time as text.
    """

    time: int
    fields: dict[str, object]


def entry(event: str, **facts: object) -> AuditEntry:
    """Return a record with the time and the actor of this task; see `record`."""
    actor = audit_actor.get()
    now = time.time_ns() // 1000
    moment = _EPOCH + timedelta(microseconds=now)
    fields: dict[str, object] = {
        "time": moment.isoformat(timespec="microseconds"),
        "event": event,
        "actor": None if actor is None else str(actor),  # the application may have set any object
        "process": os.getpid(),
        **{name: value for name, value in facts.items() if value is not None},
    }
    return AuditEntry(now, fields)


def write(made: AuditEntry) -> None:
    """Write *made* with the logger, if the logger is enabled."""
    if is_on():
        # The attribute `audit` contains the same facts, for log handlers that do not parse the
        # message.
        logger.info("%s", json.dumps(made.fields), extra={"audit": made.fields})


def record(event: str, **facts: object) -> None:
    """Write one record of the audit log.

    If the running call stores its records in the audit trail, also keep the record for the trail.

    Args:
        event: What happened, for example `record.rejected`.
        **facts: Values for JSON, without plaintext and keys.  None values are omitted.
    """
    call = _call.get()
    if call is None and not is_on():
        return
    made = entry(event, **facts)
    if call is not None:
        call.keep(made)
    write(made)


def record_rejected(error: DecryptionError) -> None:
    """Count a stored value that was rejected with *error*, and write an audit record of it."""
    count_rejected(error)
    record(
        "record.rejected",
        table=error.table,
        row=error.row,
        reason=str(error.reason),
        error=type(error).__name__,
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

    The audit record contains the numbers and booleans in the function's result, and
    the facts that were passed to `add_facts`.

    If a database that the function opens has an audit trail, a record is stored there before the
    function can use the keys, and another one at its end.
    """
    return _command(function, is_stored=True)


def unstored_command(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate the function of a command that must work if the account can only read.

    Do the same as `command`, but store no records in the audit trail.
    """
    return _command(function, is_stored=False)


def _command(
    function: Callable[P, Awaitable[T]], *, is_stored: bool
) -> Callable[P, Coroutine[Any, Any, T]]:
    async def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        facts: dict[str, object] = {"command": function.__name__, "account": account()}
        if kwargs.get("dry_run"):
            facts["dry_run"] = True
        # A command that another command calls stores no records of its own.
        is_outer = _facts.get() is None
        running = CommandCall(facts) if is_stored and is_outer else _call.get()
        try:
            with bound(_facts, facts), bound(_call, running):
                result = await function(*args, **kwargs)
        except BaseException as error:
            with bound(_call, running):
                if isinstance(error, DecryptionError):
                    record_rejected(error)
            made = entry("command", **facts, outcome="failure", error=type(error).__name__)
            write(made)
            if isinstance(running, CommandCall) and is_outer and isinstance(error, Exception):
                await running.end_failed(made)
            raise
        made = entry("command", **facts, outcome="success", result=_numbers(result))
        if isinstance(running, CommandCall) and is_outer:
            await running.end(made)
        write(made)
        return result

    return starting(function, partial(measuring, function, recorded))


def _numbers(result: object) -> dict[str, object] | None:
    """Return the fields of *result* that are integers or booleans; None if there are none.

    Only a `Result` or a named tuple has fields.
    """
    read = result.fields if isinstance(result, Result) else getattr(result, "_asdict", dict)
    fields: dict[str, object] = read()
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

    @property
    def _audit_trail(self) -> "Trail | None":
        """The audit trail that stores the records; None if they are only logged."""
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
            if read_ids is not None and service._audit_trail is not None:
                ids = _ids_of(signature.bind(service, *args, **kwargs).arguments)
                access = AccessCall(service._audit_trail, action, read_ids, ids)
                return await access.run(partial(method, service, *args, **kwargs))
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
            facts = read_ids(*_with_new_id(ids, result))
            record(action, **facts, outcome=_outcome(action, result))
            return result

        async def covering(inner: object, service: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with bound(_covered, inner):
                return await recorded(service, *args, **kwargs)

        def start(service: A, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
            if covers is not None:
                return covering(covers(service), service, *args, **kwargs)
            is_covered = _covered.get() is service
            return measuring(method, method if is_covered else recorded, service, *args, **kwargs)

        return starting(method, start)

    return decorate


def _with_new_id(ids: tuple[str, str, str], result: object) -> tuple[str, str, str]:
    """Return *ids*; if the service has chosen the id of a new session, with the id of *result*."""
    return (*ids[:2], ids[2] or str(getattr(result, "id", "") or ""))


def _outcome(action: str, result: object) -> str:
    return "missing" if result is None and action.endswith(".read") else "success"


@cache
def _warn_that_it_is_off() -> None:
    """Log a warning, once in this process, that accesses are not recorded."""
    # This is not a record of the audit log, whose messages are JSON.
    logger = logging.getLogger("adk_secure_sessions")
    logger.warning(
        "the service has audit=, but no access is recorded: switch the logger "
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


# --- Calls whose records are stored in the audit trail --------------------------------------------


class Trail(Protocol):
    """The audit trail of a database: `storage.features.audit_trail.AuditTrail`."""

    @property
    def executor(self) -> object:
        """The executor of the data database."""
        ...

    async def prepare(self) -> None:
        """Open the database, and create the table if it is missing."""
        ...

    async def store(self, entries: Sequence[AuditEntry], *, retries: bool = True) -> None:
        """Store *entries* in a transaction of their own."""
        ...

    async def write(
        self,
        transaction: Callable[[], Any],
        made: AuditEntry,
        on_commit_after_cancel: Callable[[Any], None] | None,
        *,
        holds_locks: bool,
    ) -> tuple[Any, bool]:
        """Run *transaction*, and store *made* in it if the transaction changes something.

        Return the result, and whether *made* was stored.
        """
        ...


class _Call:
    """A running call that stores records in the audit trail.

    Attributes:
        kept: The records of security events that happened during the call.
    """

    def __init__(self) -> None:
        self.kept: list[AuditEntry] = []
        self._omitted = 0

    def keep(self, made: AuditEntry) -> None:
        """Keep *made* for the audit trail, unless `_MOST_KEPT` records are kept already."""
        if len(self.kept) < _MOST_KEPT:
            self.kept.append(made)
        else:
            self._omitted += 1

    def _all_kept(self) -> list[AuditEntry]:
        if not self._omitted:
            return self.kept
        return [*self.kept, entry("records.omitted", number=self._omitted)]


# What the running call stores in the audit trail; None if it stores nothing.
_call: ContextVar[_Call | None] = ContextVar("audit_call", default=None)


class SecurityCall(_Call):
    """A call that is no access, and stores only the records of security events."""

    def __init__(self, trail: Trail) -> None:
        super().__init__()
        self._trail = trail
        self._is_ready = False  # whether the trail could be opened

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await *call*, store the kept records, and return the result of *call*.

        Raises the errors of *call*, and those of storing the records.
        """
        try:
            with bound(_call, self):
                await self._trail.prepare()
                self._is_ready = True
                result = await call()
        except BaseException as error:
            with bound(_call, self):
                if isinstance(error, DecryptionError):
                    record_rejected(error)
            made = self._failed(error)
            if made is not None:
                write(made)
            if isinstance(error, Exception):
                await self._store_failed(made)
            raise
        made = self._succeeded(result)
        await self._trail.store([*self._all_kept(), *self._unstored(made)])
        if made is not None:
            write(made)
        return result

    def _failed(self, error: BaseException) -> AuditEntry | None:
        return None

    def _succeeded(self, result: object) -> AuditEntry | None:
        return None

    def _unstored(self, made: AuditEntry | None) -> list[AuditEntry]:
        return []

    async def _store_failed(self, made: AuditEntry | None) -> None:
        """Store the records of a call that has failed.

        If they cannot be stored either, log that: the caller gets the first error.
        """
        if self._is_ready:
            await _store_after_failure(self._trail, [*self._all_kept(), *([made] if made else [])])


class AccessCall(SecurityCall):
    """An access to a session, a state, an artifact or a memory.

    Args:
        trail: Stores the records.
        action: The event in the record, for example `session.read`.
        read_ids: Converts the ids to the form that records show.
        ids: The app name, the user id and the session id.
    """

    def __init__(
        self, trail: Trail, action: str, read_ids: ReadIds, ids: tuple[str, str, str]
    ) -> None:
        super().__init__(trail)
        self._action = action
        self._read_ids = read_ids
        self._ids = ids
        # The record that the last transaction of the call has stored; None if it stored none.
        self._stored: AuditEntry | None = None

    def records_on(self, executor: object) -> bool:
        """Return whether the changes of this call that run on *executor* must store a record."""
        return self._trail.executor is executor

    async def write(
        self,
        change: str,
        session_id: str,
        transaction: Callable[[], Any],
        on_commit_after_cancel: Callable[[Any], None] | None,
        *,
        holds_locks: bool,
    ) -> Any:
        """Run *transaction* with the record of this access, and return its result.

        Args:
            change: What the transaction changes, for the record.
            session_id: The id of the session, in case the caller of the service has given none.
            transaction: See `Executor.write`.
            on_commit_after_cancel: See `Executor.write`.
            holds_locks: See `Executor.write`.
        """
        ids = (*self._ids[:2], self._ids[2] or session_id)
        made = entry(self._action, **self._read_ids(*ids), outcome="success", change=change)
        self._stored = None
        result, was_stored = await self._trail.write(
            transaction, made, on_commit_after_cancel, holds_locks=holds_locks
        )
        if was_stored:
            self._stored = made
        return result

    def _failed(self, error: BaseException) -> AuditEntry | None:
        facts = self._read_ids(*self._ids)
        return entry(self._action, **facts, outcome="failure", error=type(error).__name__)

    def _succeeded(self, result: object) -> AuditEntry | None:
        if self._stored is not None:
            return self._stored
        facts = self._read_ids(*_with_new_id(self._ids, result))
        return entry(self._action, **facts, outcome=_outcome(self._action, result))

    def _unstored(self, made: AuditEntry | None) -> list[AuditEntry]:
        return [] if made is None or made is self._stored else [made]


class CommandCall(_Call):
    """A command.  Each database that it opens and that has an audit trail stores its records."""

    def __init__(self, facts: dict[str, object]) -> None:
        super().__init__()
        self._began = entry("command", **facts, outcome="started")
        self._trails: list[Trail] = []

    def is_recorded_in(self, trail: Trail) -> bool:
        """Return whether *trail* has the record that the command has started."""
        return trail in self._trails

    async def opened(self, trail: Trail, *, is_prepared: bool) -> None:
        """Store the record that the command has started in *trail*; first prepare the trail."""
        # The methods of the trail use the keys, before which `Database` calls this method.
        self._trails.append(trail)
        try:
            if not is_prepared:
                await trail.prepare()
            await trail.store([self._began])
        except BaseException:
            self._trails.remove(trail)
            raise

    def forget_trails(self) -> None:
        """Store nothing more in the trails, whose rows the command has deleted."""
        self._trails.clear()

    async def end(self, made: AuditEntry) -> None:
        """Store *made*, the last record, and the records of security events."""
        for trail in self._trails:
            await trail.store([*self._all_kept(), made])

    async def end_failed(self, made: AuditEntry) -> None:
        """Do the same as `end` after a failure; only log that a record could not be stored."""
        for trail in self._trails:
            await _store_after_failure(trail, [*self._all_kept(), made])


async def _store_after_failure(trail: Trail, entries: Sequence[AuditEntry]) -> None:
    try:
        await trail.store(entries, retries=False)
    except Exception as error:
        logging.getLogger("adk_secure_sessions").error(
            "the audit record of a failed call could not be stored: %s", error
        )


def running_access(executor: object) -> AccessCall | None:
    """Return the access whose record a transaction on *executor* must store; None if there is none.

    *executor* is the executor of a data database.
    """
    call = _call.get()
    return call if isinstance(call, AccessCall) and call.records_on(executor) else None


def running_command() -> CommandCall | None:
    """Return the running command, whose records are stored; None if there is none."""
    call = _call.get()
    return call if isinstance(call, CommandCall) else None


async def store_rejected(trail: Trail | None, error: DecryptionError) -> None:
    """Do the same as `record_rejected`, outside a call of a service; also store the record."""
    call = None if trail is None else SecurityCall(trail)
    with bound(_call, call):
        record_rejected(error)
    if call is not None and trail is not None:
        await _store_after_failure(trail, call.kept)


async def storing(trail: Trail | None, call: Callable[[], Awaitable[T]]) -> T:
    """Await *call* and return its result; store its security events in *trail* if it is given."""
    return await (call() if trail is None else SecurityCall(trail).run(call))


def record_head(**facts: object) -> None:
    """Write the number and the link of the last record of a chain of the audit trail."""
    if is_on():
        write(entry("audit.head", **facts))


@cache
def warn_of_heads() -> None:
    """Log a warning, once in this process, that the heads of chains are not logged."""
    logger = logging.getLogger("adk_secure_sessions")
    logger.warning(
        "the heads of the audit trail's chains are not logged, so removed last records "
        "are not detected: switch the logger adk_secure_sessions.audit on with "
        "setLevel(logging.INFO)"
    )
