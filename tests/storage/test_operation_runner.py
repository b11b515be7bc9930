"""An operation is attempted until it has its keys and meets no conflict, and not once more."""

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from threading import Event, Thread, current_thread

import pytest

from adk_secure_sessions.caches import Caches
from adk_secure_sessions.db.protocol import (
    Apply,
    Conflict,
    Disconnected,
    Executors,
    Retries,
    UniqueViolation,
)
from adk_secure_sessions.errors import (
    DatabaseError,
    SecureSessionError,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.keys.data_keys import DataKeyRow, StaleKeyring, TransactionKeys
from adk_secure_sessions.keys.keyring import DATA_MASTER, Keyring, MasterFingerprint, MasterKeyRow
from adk_secure_sessions.storage.operation_runner import (
    Attempt,
    KeySource,
    NeedsDataKey,
    OpenKeyring,
    OperationRunner,
    StorageOperation,
    empty_caches,
    read_data_keys,
)
from adk_secure_sessions.storage.reads import GetSession
from tests.storage.support import (
    ANOTHER_MASTER,
    MASTER,
    WHO,
    FakeExecutor,
    Stored,
    backends,
    change_in,
    data_keys,
    fingerprints,
    key_rows,
    keyring,
    one_database,
    two_databases,
)

LOST = Disconnected(DatabaseError("the database's error"))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each pause would have been; none is waited for."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


class Scripted(StorageOperation[object]):
    """An operation that does in each attempt what its script says; keeps the attempts."""

    identity = WHO
    writes = False

    def __init__(self, *script: object, reads_keys: bool = False) -> None:
        self.needs_fresh_keys = reads_keys
        self._script = list(script)
        self.attempts: list[Attempt] = []

    async def execute(self, attempt: Attempt) -> object:
        self.attempts.append(attempt)
        outcome = self._script.pop(0)
        if callable(outcome):
            outcome = outcome(attempt)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @property
    def sources(self) -> list[KeySource]:
        return [attempt.key_source for attempt in self.attempts]


class KeyringReads:
    """Opens a keyring as often as it is asked; gives the next of its keyrings, or raises it."""

    def __init__(self, *results: Keyring | Exception) -> None:
        self._results = [*results] or [keyring()]
        self.seen: list[Keyring | None] = []

    async def __call__(self, known: Keyring | None) -> Keyring:
        self.seen.append(known)
        result = self._results.pop(0) if len(self._results) > 1 else self._results[0]
        if isinstance(result, Exception):
            raise result
        return result


CACHES = Caches(sessions=10, data_keys=10)


def runner_of(executors: Executors, keyrings: OpenKeyring | None = None) -> OperationRunner:
    return OperationRunner(executors, backends(), keyrings or KeyringReads(), cache_sizes=CACHES)


def load_keys(attempt: Attempt) -> str:
    """An attempt that reads the owners' data keys, and succeeds."""
    for owner in (WHO.app_tag, WHO.user_tag):
        attempt.keys.create_data_key(owner)
    return "done"


async def runner_that_knows_the_keys() -> OperationRunner:
    runner = runner_of(one_database()[0])
    staged = TransactionKeys(await runner.database_keys())
    for owner in (WHO.app_tag, WHO.user_tag):
        staged.create_data_key(owner)
    staged.publish()
    return runner


# --- pauses --------------------------------------------------------------------------------------


async def waited_for(retries: Retries, error: Conflict | UniqueViolation | Disconnected) -> int:
    """How often it pauses before it gives up."""
    for number in range(1000):
        try:
            await retries.pause_or_raise(error)
        except Exception:
            return number
    raise AssertionError("it never gives up")


async def test_read_that_lost_its_connection_is_repeated_once(pauses: list[float]) -> None:
    assert await waited_for(Retries(writes=False), LOST) == 1
    assert pauses == [0.05]


async def test_write_that_lost_its_connection_is_repeated_after_ever_longer_pauses(
    pauses: list[float],
) -> None:
    """Until it is known whether it was stored, there is nothing true to tell the caller."""
    assert await waited_for(Retries(writes=True), LOST) == 5
    assert pauses == sorted(pauses) == [0.05, 0.2, 0.5, 1.0, 2.0]


async def test_connection_that_stays_lost_ends_in_the_databases_error(pauses: list[float]) -> None:
    retries = Retries(writes=False)
    await retries.pause_or_raise(LOST)
    with pytest.raises(DatabaseError, match="the database's error") as raised:
        await retries.pause_or_raise(LOST)
    assert raised.value is LOST.error


@pytest.mark.parametrize("error", [Conflict(), UniqueViolation()], ids=["conflict", "unique"])
@pytest.mark.parametrize("writes", [True, False])
async def test_attempts_are_repeated_39_times_after_longer_and_longer_random_pauses(
    pauses: list[float], error: Conflict | UniqueViolation, writes: bool
) -> None:
    assert await waited_for(Retries(writes=writes), error) == 39
    assert all(0 <= pause <= 0.005 * number for number, pause in enumerate(pauses[:3], start=1))
    assert all(0 <= pause <= 1 for pause in pauses)
    assert len(set(pauses)) > 1


async def test_endless_conflicts_end_in_an_error_that_may_be_retried(pauses: list[float]) -> None:
    retries = Retries(writes=True)
    await asyncio.gather(*(retries.pause_or_raise(Conflict()) for _ in range(39)))
    with pytest.raises(SecureSessionError, match="try again") as raised:
        await retries.pause_or_raise(Conflict())
    assert raised.value.retryable


# --- attempts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Conflict(), UniqueViolation(), LOST])
async def test_attempt_that_met_a_changed_row_or_lost_its_connection_is_repeated(
    pauses: list[float], error: Exception
) -> None:
    operation = Scripted(error, "done")
    assert await runner_of(one_database()[0]).run(operation) == "done"
    assert len(operation.attempts) == 2
    assert len(pauses) == 1


async def test_attempts_trust_no_cache_from_the_second_on_and_lock_rows_after_three_conflicts(
    pauses: list[float],
) -> None:
    """A lost connection, of which a read may meet one, is no conflict."""
    operation = Scripted(Conflict(), LOST, UniqueViolation(), Conflict(), Conflict(), "done")
    await (await runner_that_knows_the_keys()).run(operation)
    locks = [attempt.must_lock_rows for attempt in operation.attempts]
    assert locks == [False, False, False, False, True, True]
    assert [attempt.may_use_cached_rows for attempt in operation.attempts] == [True] + [False] * 5


async def test_error_of_the_operation_is_not_repeated(pauses: list[float]) -> None:
    operation = Scripted(TamperedError("tampered"))
    with pytest.raises(TamperedError, match="tampered"):
        await runner_of(one_database()[0]).run(operation)
    assert (len(operation.attempts), pauses) == (1, [])


# --- data keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knows", "reads_keys", "source"),
    [
        (True, False, KeySource.CACHE),
        (False, False, KeySource.QUERY),
        (True, True, KeySource.QUERY),
    ],
    ids=["known", "unknown", "asked for"],
)
async def test_data_keys_are_read_with_the_rows_unless_they_are_known(
    knows: bool, reads_keys: bool, source: KeySource
) -> None:
    operation = Scripted("done", reads_keys=reads_keys)
    runner = await runner_that_knows_the_keys() if knows else runner_of(one_database()[0])
    await runner.run(operation)
    assert operation.sources == [source]


async def test_key_that_is_not_known_is_looked_up_once_and_then_missing() -> None:
    runner = await runner_that_knows_the_keys()
    operation = Scripted(UnknownKeyError("no key"), UnknownKeyError("no key"))
    with pytest.raises(UnknownKeyError):
        await runner.run(operation)
    assert operation.sources == [KeySource.CACHE, KeySource.QUERY]


async def test_keys_of_an_attempt_that_succeeded_are_shared_with_later_ones() -> None:
    runner = runner_of(one_database()[0])
    await runner.run(Scripted(load_keys))
    later = Scripted("done")
    await runner.run(later)
    assert later.sources == [KeySource.CACHE]


async def test_keys_of_an_attempt_that_failed_are_not_shared(pauses: list[float]) -> None:
    """Its new key was not stored: what it would encrypt could never be read."""

    def fails(attempt: Attempt) -> Exception:
        load_keys(attempt)
        return TamperedError()

    runner = runner_of(one_database()[0])
    with pytest.raises(TamperedError):
        await runner.run(Scripted(fails))
    assert not (await runner.database_keys()).by_owner.get(WHO.user_tag)


# --- data keys in a key database -----------------------------------------------------------------


NO_KEYS = key_rows([])


def stored_keys() -> list[DataKeyRow]:
    staged = TransactionKeys(data_keys())
    return [staged.create_data_key(WHO.app_tag), staged.create_data_key(WHO.user_tag)]


async def test_key_database_is_read_before_the_attempt() -> None:
    rows = stored_keys()
    executors, data, keys = two_databases(keys=[key_rows(rows)])
    operation = Scripted("done")
    await runner_of(executors).run(operation)
    assert operation.sources == [KeySource.KEY_DATABASE]
    assert (data.requests, keys.requests) == ([], ["read data keys of owners"])
    attempt = operation.attempts[0]
    assert attempt.keys.has_fresh_keys(WHO.user_tag)


async def test_key_that_the_key_database_lacks_is_looked_up_twice() -> None:
    """It may have been made, or retired, between the read of the keys and that of the rows."""
    executors, _, keys = two_databases(keys=[NO_KEYS, NO_KEYS])
    operation = Scripted(UnknownKeyError("no key"), UnknownKeyError("no key"))
    with pytest.raises(UnknownKeyError):
        await runner_of(executors).run(operation)
    assert len(keys.requests) == 2


async def test_new_data_key_is_stored_in_the_key_database_before_the_attempt_that_uses_it() -> None:
    executors, data, keys = two_databases(keys=[NO_KEYS, True, NO_KEYS])
    operation = Scripted(NeedsDataKey(WHO.user_tag, 0), "done")
    assert await runner_of(executors).run(operation) == "done"
    read = "read data keys of owners"
    assert (data.requests, keys.requests) == ([], [read, "apply INSERT_KEY", read])
    made = change_in(keys.steps[1], "INSERT_KEY").parameters
    assert (made["owner"], made["generation"], made["master_count"]) == (WHO.user_tag, 0, 2)


async def test_data_key_that_another_process_stored_first_is_read_instead(
    pauses: list[float],
) -> None:
    executors, _, keys = two_databases(keys=[NO_KEYS, UniqueViolation(), key_rows(stored_keys())])
    operation = Scripted(NeedsDataKey(WHO.user_tag, 0), "done")
    assert await runner_of(executors).run(operation) == "done"
    assert (len(keys.requests), len(pauses)) == (3, 1)


async def test_data_key_that_the_keyring_no_longer_allows_waits_for_the_new_keyring(
    pauses: list[float],
) -> None:
    """INSERT_KEY met no row: a master key was made or retired meanwhile."""
    newer = keyring(MASTER, ANOTHER_MASTER)
    keyrings = KeyringReads(keyring(), newer)
    empty = key_rows([], newer)
    executors, _, keys = two_databases(keys=[NO_KEYS, False, empty, True, empty])
    operation = Scripted(NeedsDataKey(WHO.user_tag, 0), NeedsDataKey(WHO.user_tag, 0), "done")
    runner = runner_of(executors, keyrings)
    assert await runner.run(operation) == "done"
    assert (await runner.keyring()) is newer
    guards = [
        change_in(step, "INSERT_KEY").parameters for step in keys.steps if isinstance(step, Apply)
    ]
    assert [(guard["master_id"], guard["master_count"]) for guard in guards] == [
        (MASTER, 2),
        (ANOTHER_MASTER, 3),
    ]


async def test_owners_are_asked_for_once_and_only_by_tag() -> None:
    executor = FakeExecutor(key_rows(stored_keys()))
    owners: list[object] = [WHO.user_tag, WHO.user_tag, "text", 17, None]
    found = await read_data_keys(executor.read, owners)
    assert [row.owner for row in found.data_keys] == [WHO.app_tag, WHO.user_tag]
    assert found.master_fingerprints == fingerprints()
    assert len(executor.requests) == 1


async def test_keyring_is_read_even_for_no_owner() -> None:
    found = await read_data_keys(FakeExecutor(NO_KEYS).read, ["text"])
    assert (found.data_keys, found.master_fingerprints) == ([], fingerprints())


# --- the keyring ---------------------------------------------------------------------------------


async def test_keyring_is_opened_once_however_many_tasks_begin() -> None:
    keyrings = KeyringReads()
    runner = runner_of(one_database()[0], keyrings)
    await asyncio.gather(*(runner.run(Scripted("done")) for _ in range(5)))
    assert keyrings.seen == [None]


async def test_keyring_that_another_event_loop_opens_meanwhile_is_kept() -> None:
    """It may be marked with an indexed state key already."""
    kept: list[Keyring] = []

    async def open_keyring(known: Keyring | None) -> Keyring:
        if not kept:
            kept.append(keyring())
            await asyncio.to_thread(asyncio.run, runner.keyring())
            return keyring()
        return kept[0]

    runner = runner_of(one_database()[0], open_keyring)
    assert await runner.keyring() is kept[0]


async def test_keyring_that_cannot_be_opened_is_opened_again_only_by_later_calls() -> None:
    """The last of many tasks must not wait for the time-outs of all tasks before it."""
    reads = KeyringReads(WrongKeyError("wrong"), keyring())

    async def open_keyring(known: Keyring | None) -> Keyring:
        await asyncio.sleep(0)
        return await reads(known)

    runner = runner_of(one_database()[0], open_keyring)
    calls = (runner.database_keys() for _ in range(5))
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in errors] == ["wrong"] * 5
    assert len({id(error) for error in errors}) == 5, "callers may add notes"
    assert reads.seen == [None]
    assert (await runner.keyring()).row_count == 2


async def test_master_key_that_no_newly_read_keyring_has_is_unknown_and_not_stale() -> None:
    """A data key that names a master key of nobody's must not be asked for without end."""
    forger = TransactionKeys(data_keys(keyring(ANOTHER_MASTER)))
    forged = forger.create_data_key(WHO.user_tag)
    record = forger.seal(WHO.user_tag, b"", b"")

    def loads(attempt: Attempt) -> object:
        attempt.keys.unwrap([forged], fingerprints())
        return attempt.keys.open(WHO.user_tag, b"", record)

    operation = Scripted(loads, loads)
    with pytest.raises(UnknownKeyError, match="keyring holds no data master"):
        await runner_of(one_database()[0]).run(operation)
    assert len(operation.attempts) == 1


async def test_tasks_that_saw_the_same_stale_keyring_read_the_new_one_once() -> None:
    operations = [Scripted(StaleKeyring(), "done") for _ in range(5)]
    reads = 0

    async def open_keyring(known: Keyring | None) -> Keyring:
        nonlocal reads
        reads += 1
        while known and not all(operation.attempts for operation in operations):
            await asyncio.sleep(0)  # the others are about to notice, too
        return keyring()

    runner = runner_of(one_database()[0], open_keyring)
    await runner.database_keys()
    await asyncio.gather(*map(runner.run, operations))
    assert reads == 2


async def test_rejected_keyring_is_not_asked_for_by_every_operation() -> None:
    """An attacker who can write must not make each operation call a key service."""
    keyrings = KeyringReads(keyring(), WrongKeyError("a row of the keyring was tampered with"))
    runner = runner_of(one_database()[0], keyrings)
    for _ in range(5):
        with pytest.raises(WrongKeyError, match="tampered"):
            await runner.run(Scripted(StaleKeyring()))
    assert len(keyrings.seen) == 2
    assert await runner.run(Scripted("done")) == "done"


@pytest.mark.parametrize(("makes_key", "reads"), [(True, 2), (False, 1)])
async def test_conflict_of_an_attempt_with_a_new_key_renews_the_keyring(
    pauses: list[float], makes_key: bool, reads: int
) -> None:
    """INSERT_KEY met no row where the keyring has changed: so it may have."""

    def conflict(attempt: Attempt) -> Exception:
        if makes_key:
            load_keys(attempt)
        return Conflict()

    keyrings = KeyringReads(keyring(), keyring())
    await runner_of(one_database()[0], keyrings).run(Scripted(conflict, "done"))
    assert len(keyrings.seen) == reads


async def test_data_keys_as_stored_now_are_read_under_the_keyring_of_now() -> None:
    newer = keyring(MASTER, ANOTHER_MASTER)
    row = TransactionKeys(data_keys(newer)).create_data_key(WHO.user_tag)
    executors, executor = one_database(key_rows([row], newer), key_rows([row], newer))
    runner = runner_of(executors, KeyringReads(keyring(), newer))
    keys = await runner.unwrap_data_keys(WHO.user_tag)
    assert keys.has_fresh_keys(WHO.user_tag)
    assert (await runner.keyring()) is newer
    # They are read again after the keyring, because both may have changed meanwhile.
    assert executor.requests == ["read data keys of owners"] * 2


def test_rereads_of_two_event_loops_that_fail_leave_the_retry_due() -> None:
    old = keyring()
    old.retry_at = 0.0
    second_began, first_ended = Event(), Event()

    async def fail(_: Keyring | None) -> Keyring:
        is_first = current_thread() is first
        if not is_first:
            second_began.set()
        await asyncio.to_thread((second_began if is_first else first_ended).wait, 5)
        raise DatabaseError("the key service is down")

    runner, keys = runner_of(one_database()[0], fail), data_keys(old)

    def reread() -> None:
        with pytest.raises(DatabaseError):
            asyncio.run(runner.reread_keyring(keys, old))

    first = Thread(target=reread)
    first.start()
    while old.retry_at == 0.0:
        time.sleep(0.01)
    second = Thread(target=reread)
    second.start()
    first.join()
    first_ended.set()
    second.join()
    assert old.retry_at == 0.0


# --- single statements, identities, the end -------------------------------------------------------

CALLS: dict[str, Callable[[OperationRunner], object]] = {
    "read": lambda runner: runner.data_db.read(None, {}),  # type: ignore[arg-type]
    "read of keys": lambda runner: runner.key_db.read(None, {}),  # type: ignore[arg-type]
    "change": lambda runner: runner.data_db.run_sync(lambda connection: None),
    "change of keys": lambda runner: runner.key_db.run_sync(lambda connection: None),
}


@pytest.mark.parametrize("name", CALLS)
async def test_single_statement_is_repeated_when_its_connection_is_lost(
    pauses: list[float], name: str
) -> None:
    executors, executor = one_database(LOST, "rows")
    assert await CALLS[name](runner_of(executors)) == "rows"  # type: ignore[misc]
    assert (executor.answers, pauses) == ([], [0.05])


async def test_identity_of_a_stored_session_is_computed_once() -> None:
    stored = Stored()
    runner = runner_of(one_database(stored.rows(keys=True))[0], KeyringReads(stored.keys.keyring))
    identity = await runner.identify(*WHO[:3])
    await runner.run(GetSession(identity, lambda *_: []))
    assert identity == WHO
    assert await runner.identify(*WHO[:3]) is identity


async def filled_runner(
    executors: Executors, keyrings: OpenKeyring, seconds: float = 300.0
) -> OperationRunner:
    """A runner that has read a session: its keys, its rows and its ids are cached."""
    runner = OperationRunner(
        executors, backends(), keyrings, cache_sizes=Caches(10, 10, seconds=seconds)
    )
    assert await runner.run(GetSession(await runner.identify(*WHO[:3]), lambda *_: []))
    return runner


async def cache_of(runner: OperationRunner) -> weakref.ref[object]:
    reading = Scripted("done")
    await runner.run(reading)
    return weakref.ref(reading.attempts[0].row_cache)


READ_WITH_KEYS = "read SESSION_WITH_ALL_EVENTS with keys"


async def test_use_does_not_lengthen_the_cache_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, clock = Stored(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    executors, executor = one_database(*[stored.rows(keys=True)] * 5)
    runner = await filled_runner(executors, KeyringReads(), 10)
    for clock[0] in (1004.0, 1008.0, 1009.9, 1010.0):
        await runner.run(GetSession(WHO, lambda *_: []))
    assert [request == READ_WITH_KEYS for request in executor.requests] == [
        True, False, False, False, True
    ]  # fmt: skip


async def test_caches_are_emptied_after_their_time_although_no_operation_follows() -> None:
    stored = Stored()
    executors, _ = one_database(*[stored.rows(keys=True)] * 3)
    runner = await filled_runner(executors, KeyringReads(), 0.05)
    for _ in range(2):  # the timer is started again
        rows = await cache_of(runner)
        await runner.run(GetSession(await runner.identify(*WHO[:3]), lambda *_: []))
        await asyncio.sleep(0.1)
        gc.collect()
        assert rows() is None


async def test_caches_are_emptied_by_the_loop_that_still_runs() -> None:
    """Another loop, which has used the service first, has ended before."""
    stored = Stored()
    executors, _ = one_database(*[stored.rows(keys=True)] * 2)
    runners: list[OperationRunner] = []

    async def first() -> weakref.ref[asyncio.AbstractEventLoop]:
        runners.append(await filled_runner(executors, KeyringReads(), 0.3))
        return weakref.ref(asyncio.get_running_loop())

    ended = await asyncio.to_thread(lambda: asyncio.run(first()))
    gc.collect()
    assert ended() is None, "a timer keeps its loop"
    rows = await cache_of(runners[0])
    await asyncio.sleep(0.4)
    gc.collect()
    assert rows() is None


async def test_one_timer_runs_which_keeps_no_unit_and_ends_with_close() -> None:
    stored, loop = Stored(), asyncio.get_running_loop()
    executors, _ = one_database(*[stored.rows(keys=True)] * 2)
    runner = await filled_runner(executors, KeyringReads(), 300)
    waiting: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
    assert sum(not timer.cancelled() for timer in waiting) == 1
    for _ in range(100):
        await runner.identify(*WHO[:3])
        runner.empty_caches()
    assert sum(not timer.cancelled() for timer in waiting) == 1
    await runner.close()
    assert sum(not timer.cancelled() for timer in waiting) == 0
    variable = ContextVar[object]("variable")
    kept = Scripted("done")
    variable.set(kept)
    runner = await filled_runner(executors, KeyringReads(), 300)
    variable.set(None)
    dropped, of_call = weakref.ref(runner), weakref.ref(kept)
    del kept
    del runner
    gc.collect()
    assert (dropped(), of_call()) == (None, None)


async def test_one_call_empties_the_caches_of_all_units_and_keeps_their_keyrings() -> None:
    stored = Stored()
    runners, opened = [], []
    for _ in range(3):
        executors, executor = one_database(stored.rows(keys=True), stored.rows(keys=True))
        keyrings = KeyringReads()
        runners.append((await filled_runner(executors, keyrings), executor, keyrings))
        opened.append(await runners[-1][0].database_keys())
    never_opened = runner_of(one_database()[0])
    empty_caches()
    for (runner, executor, keyrings), before in zip(runners, opened, strict=True):
        after = await runner.database_keys()
        assert not after.by_owner.get(WHO.user_tag)
        assert after.keyring is before.keyring
        identity = await runner.identify(*WHO[:3])
        assert await runner.run(GetSession(identity, lambda *_: []))
        assert executor.requests == [READ_WITH_KEYS] * 2
        assert keyrings.seen == [None]
    assert (await never_opened.keyring()).row_count == 2


async def test_operation_that_runs_while_the_caches_are_emptied_fills_none() -> None:
    runner = await runner_that_knows_the_keys()

    def empties(attempt: Attempt) -> str:
        empty_caches()
        return load_keys(attempt)

    await runner.run(Scripted(empties, reads_keys=True))
    assert not (await runner.database_keys()).by_owner.get(WHO.user_tag)


def test_caches_can_be_emptied_while_another_thread_creates_services() -> None:
    """An erasure must not fail after its commit."""
    executors, interval = one_database()[0], sys.getswitchinterval()
    done = Event()

    def create() -> None:
        while not done.is_set():
            kept = [runner_of(executors) for _ in range(1000)]
            del kept

    sys.setswitchinterval(1e-6)
    creating = Thread(target=create)
    creating.start()
    try:
        for _ in range(2000):
            empty_caches()
    finally:
        done.set()
        creating.join()
        sys.setswitchinterval(interval)


async def test_pending_rows_are_tried_again_by_one_task_after_the_pause() -> None:
    """The others go on meanwhile: a key service that is down takes seconds to fail."""
    first, seen = keyring(), list[Keyring | None]()
    stored = [*fingerprints(first), MasterFingerprint(77, 0, b"")]
    last = replace(first, rows={**first.rows, 77: MasterKeyRow(77, DATA_MASTER, "root", 0, b"")})

    def reads_keys(attempt: Attempt) -> str:
        attempt.keys.unwrap([], stored)
        return "done"

    async def use() -> None:
        await runner.run(Scripted(reads_keys, reads_keys, reads_keys=True))

    async def open_keyring(known: Keyring | None) -> Keyring:
        seen.append(known)
        if len(seen) == 3:
            await asyncio.gather(*(use() for _ in range(5)))
        return [first, keyring(pending=True), keyring(pending=True), last][len(seen) - 1]

    runner = runner_of(one_database()[0], open_keyring)
    for reads in (2, 3, 4):
        for _ in range(3):
            await use()
        assert len(seen) == reads, "not before the pause is over"
        await asyncio.sleep(0.1)
    await use()
    assert len(seen) == 4
    assert not (await runner.keyring()).rejected_or_pending


@pytest.mark.parametrize("rejected", [False, True])
async def test_nothing_is_kept_after_close(rejected: bool) -> None:
    stored = Stored()
    executors, _ = one_database(stored.rows(keys=True))

    async def open_keyring(known: Keyring | None) -> Keyring:
        if known is not None:
            raise WrongKeyError("tampered")
        return keyring()

    runner = await filled_runner(executors, open_keyring)
    operation = Scripted("done", StaleKeyring())
    await runner.run(operation)
    if rejected:
        with pytest.raises(WrongKeyError):
            await runner.run(operation)
    rows = weakref.ref(operation.attempts[0].row_cache)
    keys = weakref.ref(await runner.database_keys())
    await runner.close()
    del stored, operation
    gc.collect()
    assert (keys(), rows()) == (None, None)
