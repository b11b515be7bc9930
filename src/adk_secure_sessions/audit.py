"""The audit log: who did what with the encrypted data, and what was rejected; docs/audit.md.

The log consists of audit records.  Each is one line of JSON, which the logger
`adk_secure_sessions.audit` writes with level INFO.  No audit record contains a key, a state or the
content of an event.  Ids of users and sessions are hashed, unless a service was created with
`Audit("readable")`.

If a service was created with `Audit(table=True)`, its records are also stored in the database: see
`storage.features.audit_trail`.  The context variable `_running_call` then says what the running
call has to store.
"""

import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TextIO, TypeVar

from adk_secure_sessions.concurrency import context_value
from adk_secure_sessions.errors import ConfigurationError, DecryptionError
from adk_secure_sessions.hiding import coroutine_hiding_locals, hides_locals
from adk_secure_sessions.telemetry import call_measured, count_rejected

if sys.platform != "win32":
    import pwd

P = ParamSpec("P")
T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The maximum number of records that one call keeps for the audit trail.
_MAX_KEPT = 1000

logger: logging.Logger = logging.getLogger(__name__)
_package_logger = logging.getLogger("adk_secure_sessions")
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


class _RaisingHandler(logging.StreamHandler[TextIO]):
    """Appends the records to a file, and raises the error if a record cannot be written."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        self.has_failed = True
        raise  # the error that `emit` handles


def open_file(path: str) -> TextIO:
    """Open the file at *path* to append records; a new file gets mode 0600.  May raise OSError."""
    opener = partial(os.open, mode=0o600)
    return open(path, "a", encoding="utf-8", opener=opener)


@contextmanager
def appending_to(file: TextIO | None) -> Iterator[None]:
    """Append the audit log to *file* during the block, and then close *file*; None for no log.

    If a record cannot be written, the recorded call or the end of the block raises OSError.
    """
    if file is None:
        yield
        return
    handler = _RaisingHandler(file)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
        try:
            file.close()  # some network file systems report only now that a record was not written
        except OSError:
            if not handler.has_failed:
                raise


class AuditEntry(NamedTuple):
    """A record of the audit log, before it is written."""

    time: int  # microseconds since 1970, UTC
    fields: dict[str, object]  # values for JSON, among them the time as text


def new_entry(event: str, **facts: object) -> AuditEntry:
    """Return a record with the time and the actor of this task; see `log_event`."""
    actor = audit_actor.get()
    now = time.time_ns() // 1000
    fields: dict[str, object] = {
        "time": (_EPOCH + timedelta(microseconds=now)).isoformat(timespec="microseconds"),
        "event": event,
        "actor": None if actor is None else str(actor),  # the application may have set any object
        "process": os.getpid(),
        **{name: value for name, value in facts.items() if value is not None},
    }
    return AuditEntry(now, fields)


def log_entry(entry: AuditEntry) -> None:
    """Write *entry* with the logger, if the logger is enabled."""
    if is_on():
        # The attribute `audit` contains the same facts, for log handlers that do not parse the
        # message.
        logger.info("%s", json.dumps(entry.fields), extra={"audit": entry.fields})


def log_event(event: str, **facts: object) -> None:
    """Write one record of the audit log.

    If the running call stores its records in the audit trail, also keep the record for the trail.
    *facts* are values for JSON, without plaintext and keys; None values are omitted.
    """
    call = _running_call.get()
    if call is None and not is_on():
        return
    entry = new_entry(event, **facts)
    if call is not None:
        call.keep_security_event(entry)
    log_entry(entry)


def record_rejected(error: DecryptionError) -> None:
    """Count a stored value that was rejected with *error*, and write an audit record of it.

    Do nothing if a call inside the running call, such as a command of `separate`, did so already.
    """
    if error._is_recorded:
        return
    error._is_recorded = True
    count_rejected(error)
    log_event(
        "record.rejected",
        table=error.table,
        row=error.row,
        reason=str(error.reason),
        error=type(error).__name__,
    )


def record_opened(database_id: bytes | None, error: str | None) -> None:
    """Write an audit record: this process has opened a database, or could not open it.

    *error* is the name of the error's class.
    """
    database = database_id.hex() if database_id else None
    outcome = "failure" if error else "success"
    log_event("database.opened", database=database, account=account(), outcome=outcome, error=error)


def record_new_key(database_id: bytes, kind: str, key_id: int, **facts: object) -> None:
    """Write an audit record of a new key, after the key was stored.

    *kind* is `data key`, `data master` or `index master`.
    """
    log_event("key.created", database=database_id.hex(), kind=kind, key=key_id, **facts)


@cache
def account() -> str | None:
    """Return the name of the operating system's account that runs this process, if it has one.

    On POSIX, the environment is not asked, because whoever starts the process can set it.
    """
    name = os.environ.get("USERNAME")
    if sys.platform != "win32":
        name = None
        with suppress(KeyError):
            name = pwd.getpwuid(os.geteuid()).pw_name
    return name


def add_facts(**facts: object) -> None:
    """Add *facts* to the audit record of the command that runs in this task."""
    if (known := _facts.get()) is not None:
        known.update(facts)


def audited_command(
    function: Callable[P, Awaitable[T]], *, is_stored: bool = True
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate the function of a command: measure each call, and write an audit record at its end.

    The audit record contains the `Result.facts` of the function's result, and the facts that were
    passed to `add_facts`.

    If the function gets the keyring of a `Database` with an audit trail, a record is stored there
    before it gets the keyring, and another one at its end.
    """

    async def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        facts: dict[str, object] = {"command": function.__name__, "account": account()}
        if kwargs.get("dry_run"):
            facts["dry_run"] = True
        # A command that another command calls stores no records of its own.
        call = CommandCall(facts, is_stored=is_stored and _facts.get() is None)
        with context_value(_facts, facts):
            return await call.run(partial(function, *args, **kwargs))

    return coroutine_hiding_locals(function, partial(call_measured, function, recorded))


def logged_command(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate the function of a command that must work if the account can only read.

    Do the same as `audited_command`, but only log the audit record: the audit trail gets none.
    """
    return audited_command(function, is_stored=False)


# --- Accesses -------------------------------------------------------------------------------------

# A function that converts an app name, a user id and a session id to the facts of an audit record.
# The function must not wait for the database: a record is also written for an operation that was
# cancelled, whose coroutine must end at once.
IdFacts = Callable[[str, str, str], dict[str, object]]

# The inner service whose calls are not recorded now, because the outer method that calls it writes
# the record (`AccessAuditing.inner_service`).
_unrecorded_inner: ContextVar[object] = ContextVar("unrecorded_inner", default=None)


class AccessAuditing(NamedTuple):
    """How a service records accesses.

    `id_facts` is None if it records none.  Without `trail`, accesses are only logged.  If the
    methods of the service call those of `inner_service`, the outer call writes the audit record,
    because only it knows the outcome.  The inner call is measured.
    """

    id_facts: IdFacts | None
    trail: "Trail | None"
    inner_service: object = None


def audited_access(
    action: str,
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Decorate a method of a service: measure each call, and write an audit record of it.

    *action* is the event in the audit record, for example `session.read`.  The attribute
    `_auditing` of the service is its `AccessAuditing`.  If the service records no accesses, only
    rejected values are recorded.
    """

    def decorate(method: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        function: Callable[..., Awaitable[T]] = method

        # Gets the arguments of the call in two objects, since each `**` copies them.
        async def call_audited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
            id_facts, trail, _ = args[0]._auditing
            if id_facts is not None and trail is None and not is_on():
                warn_once(_IS_OFF)
                id_facts = None
            if id_facts is None:
                try:
                    return await function(*args, **kwargs)
                except DecryptionError as error:
                    record_rejected(error)
                    raise
            ids = _ids_of(_signature_of(method).bind(*args, **kwargs).arguments)
            access = AccessCall(trail, action, id_facts, ids)
            return await access.run(partial(function, *args, **kwargs))

        async def run_as_outer(inner: object, call: Callable[[], Awaitable[T]]) -> T:
            with context_value(_unrecorded_inner, inner):
                return await call()

        def start(*args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
            service: Any = args[0]
            if (inner := service._auditing.inner_service) is not None:  # this is the outer call
                return run_as_outer(inner, partial(call_audited, args, kwargs))
            if _unrecorded_inner.get() is service:  # the inner call, which has no inner service
                call = partial(method, *args, **kwargs)
                return call_measured(method, run_as_outer, None, call)
            return call_measured(method, call_audited, args, kwargs)

        return coroutine_hiding_locals(method, start)

    return decorate


_signature_of = cache(inspect.signature)
_MAX_ID_CHARACTERS = 1024  # the call rejects longer ids, and the rest is not recorded
_IS_OFF = (
    "the service has audit=, but no access is recorded: switch the logger "
    "adk_secure_sessions.audit on with setLevel(logging.INFO)"
)


@cache
def warn_once(text: str) -> None:
    """Log a warning, once in this process; it is no audit record, which would be JSON."""
    _package_logger.warning(text)


def _ids_of(arguments: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the app name, the user id and the session id among the arguments of a call.

    An id that is not among the arguments is empty.
    """
    session, get = arguments.get("session"), arguments.get
    ids = get("app_name"), get("user_id"), get("session_id")
    if session is not None:
        ids = session.app_name, session.user_id, session.id
    app_name, user_id, session_id = (str(one or "")[:_MAX_ID_CHARACTERS] for one in ids)
    return app_name, user_id, session_id


# --- Calls ----------------------------------------------------------------------------------------


class Trail(Protocol):
    """The audit trail of a database: `storage.features.audit_trail.AuditTrail`."""

    @property
    def executor(self) -> object: ...

    async def prepare(self) -> None: ...

    def close(self) -> None: ...

    async def store(self, entries: Sequence[AuditEntry], *, retries: bool = True) -> None: ...

    async def write_with_entries(
        self,
        transaction: Callable[[], Any],
        entries: Sequence[AuditEntry],
        on_commit: Callable[[bool], None] | None,
        *,
        in_one_transaction: bool,
    ) -> tuple[Any, bool]: ...


class AuditedCall:
    """Runs one call, and stores in audit trails the security events that happen during it.

    Subclasses add a record of the call itself, which is also logged.  Three kinds of calls store no
    records: accesses of a service without a trail, logged commands, and commands that another
    command calls.  Their security events are stored by the enclosing call, if there is one.
    """

    def __init__(self, trail: Trail | None) -> None:
        self._trail = trail
        self._has_own_records = trail is not None
        self.trails: list[Trail] = []  # those that could be opened, and store the records
        self._kept_entries: list[AuditEntry] = []
        self._omitted = 0
        # The record of this call that its last transaction has stored; None if it stored none.
        self._stored_entry: AuditEntry | None = None

    def keep_security_event(self, entry: AuditEntry) -> None:
        """Keep *entry*, a security event, unless `_MAX_KEPT` records are kept already."""
        if len(self._kept_entries) < _MAX_KEPT:
            self._kept_entries.append(entry)
        else:
            self._omitted += 1

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await *function*, record its outcome, and return its result.

        Raises the errors of *function*, and those of storing the records.
        """
        try:
            with context_value(
                _running_call, self if self._has_own_records else _running_call.get()
            ):
                try:
                    if self._trail is not None:
                        await self._trail.prepare()
                        self.trails.append(self._trail)
                    result = await function()
                except DecryptionError as error:
                    record_rejected(error)
                    raise
        except BaseException as error:
            await self._end(None, error)
            raise
        await self._end(result, None)
        return result

    async def _end(self, result: object, error: BaseException | None) -> None:
        """Log the record of this call, and store the records unless the call was cancelled."""
        entry = None if isinstance(error, Exception) else self._stored_entry
        entry = entry or self._entry(result, None if error is None else type(error).__name__)
        if entry is not None:
            log_entry(entry)
        if error is None or isinstance(error, Exception):
            await self._store(entry, has_failed=error is not None)

    async def store_rejected(self, error: DecryptionError) -> None:
        """Record a stored value that was rejected after the call of the service had ended."""
        with context_value(_running_call, self):
            record_rejected(error)
        self.trails = [] if self._trail is None else [self._trail]
        await self._store(None, has_failed=True)

    def _entry(self, result: object, error: str | None) -> AuditEntry | None:
        """Return the record of this call; *error* is the name of the error's class."""
        return None

    async def _store(self, entry: AuditEntry | None, *, has_failed: bool = False) -> None:
        """Store the kept records and *entry*, unless a transaction has stored *entry*.

        After a failure, only log that they could not be stored: the caller gets the first error.
        After a stored change, too: if the call raised an error, its caller would repeat the change.
        """
        entries = list(self._kept_entries)
        if self._omitted:
            entries.append(new_entry("records.omitted", omitted=self._omitted))
        if entry is not None and entry is not self._stored_entry:
            entries.append(entry)
        for trail in self.trails:
            try:
                await trail.store(entries, retries=not has_failed)
            except Exception as error:
                if not has_failed and self._stored_entry is None:
                    raise
                _package_logger.error("an audit record could not be stored: %s", error)


# The running call that stores its records in audit trails; None if there is none.
_running_call: ContextVar[AuditedCall | None] = ContextVar("audit_call", default=None)


class AccessCall(AuditedCall):
    """An access to a session, a state, an artifact or a memory; only logged without a trail."""

    def __init__(
        self, trail: Trail | None, action: str, id_facts: IdFacts, ids: tuple[str, str, str]
    ) -> None:
        super().__init__(trail)
        self._action = action
        self._id_facts = id_facts
        self._ids = ids

    async def write_with_entry(
        self,
        change: str,
        session_id: str,
        transaction: Callable[[], Any],
        on_commit: Callable[[], None],
        *,
        in_one_transaction: bool,
    ) -> Any:
        """Run *transaction* with the record of this access, and return its result.

        *change* says what the transaction changes.  *session_id* is the id of the session, in case
        the caller of the service has given none.  The other arguments are those of
        `Executor.write`.
        """
        assert self._trail is not None
        ids = self._with_session(session_id)
        entry = new_entry(self._action, **self._id_facts(*ids), outcome="success", change=change)
        self._stored_entry = None

        def committed(is_stored: bool) -> None:
            self._stored_entry = entry if is_stored else None
            on_commit()

        run = self._trail.write_with_entries
        arguments = (transaction, [entry], committed)
        return (await run(*arguments, in_one_transaction=in_one_transaction))[0]

    def _with_session(self, session_id: str) -> tuple[str, str, str]:
        """Return the ids, with *session_id* if the caller gave none."""
        return (*self._ids[:2], self._ids[2] or session_id)

    def _entry(self, result: object, error: str | None) -> AuditEntry:
        chosen = getattr(result, "id", "") if self._action == "session.create" else ""
        facts = self._id_facts(*self._with_session(chosen))
        outcome = "failure" if error else "success"
        if result is None and error is None and self._action.endswith(".read"):
            outcome = "missing"
        return new_entry(self._action, **facts, outcome=outcome, error=error)


class CommandCall(AuditedCall):
    """A command.  Each database that it opens and that has an audit trail stores its records."""

    def __init__(self, facts: dict[str, object], *, is_stored: bool) -> None:
        super().__init__(None)
        self._has_own_records = is_stored
        self._facts = facts
        self._start_entry = new_entry("command", **facts, outcome="started")

    async def record_start(self, trail: Trail, *, is_prepared: bool) -> None:
        """Store the record that the command has started in *trail*; first prepare the trail."""
        # The methods of the trail use the keys, before which `Database` calls this method.
        self.trails.append(trail)
        try:
            if not is_prepared:
                await trail.prepare()
            await trail.store([self._start_entry])
        except BaseException:
            self.trails.remove(trail)
            raise

    def _entry(self, result: object, error: str | None) -> AuditEntry:
        from adk_secure_sessions.results import Result  # which services do not need

        outcome = "failure" if error else "success"
        facts = result.facts or None if isinstance(result, Result) else None
        return new_entry("command", **self._facts, outcome=outcome, error=error, result=facts)


def running_access(executor: object) -> AccessCall | None:
    """Return the access whose record a transaction on *executor* must store; None if there is none.

    *executor* is the executor of a data database.
    """
    call = _running_call.get()
    if isinstance(call, AccessCall) and call._trail and call._trail.executor is executor:
        return call
    return None


def running_command() -> CommandCall | None:
    """Return the running command, whose records are stored; None if there is none."""
    call = _running_call.get()
    return call if isinstance(call, CommandCall) else None
