"""Two private PostgreSQL servers: a primary, and a standby that follows it.

How it works.  `cluster` starts both, with streaming replication, on Unix sockets.  `Node.crash`
kills all processes of a server with SIGKILL, `promote` makes the standby the new primary, and
`return_fenced` starts the old primary again with the data that it had, but read-only.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import sqlalchemy as sa

from tests import servers
from tests.servers import PostgreSQL

_PATIENCE = 60.0  # seconds


class Node(PostgreSQL):
    """One server of a cluster; its data and its socket are in *place*."""

    def __init__(self, place: Path, programs: Path, user: str | None) -> None:
        url = sa.URL.create(
            "postgresql+psycopg", "postgres", database="postgres", query={"host": str(place)}
        )
        super().__init__(url, place)
        self.data, self.programs, self._user = place / "data", programs, user
        # Data must survive a killed process, not a power cut.
        command = [str(programs / "postgres"), "-D", str(self.data), "-F", "-k", str(place)]
        self._command = [*command, "-h", "", "-cwal_level=replica"]
        self._socket = place / ".s.PGSQL.5432"
        self._node = servers._Process(self, self._socket, self._command, user, place / "log")
        self.process = self._node

    def run(self, program: str, *arguments: str) -> None:
        assert self.programs is not None
        command = [str(self.programs / program), *arguments]
        done = subprocess.run(
            command, user=self._user, capture_output=True, text=True, check=False, cwd="/"
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, *options: str) -> None:
        self._node.command = [*self._command, *options]
        super().start()

    def crash(self) -> None:
        """Kill the server and all its processes with SIGKILL, as if its machine had stopped."""
        postmaster = int((self.data / "postmaster.pid").read_text().splitlines()[0])
        os.kill(postmaster, signal.SIGSTOP)  # it starts no other process now
        for process in [*_children(postmaster), postmaster]:
            os.kill(process, signal.SIGKILL)
        self.stop()
        self._socket.unlink(missing_ok=True)

    def execute(self, statement: str) -> None:
        with self.admin.connect() as connection:
            connection.exec_driver_sql(statement)

    def scalar(self, statement: str) -> object:
        with self.admin.connect() as connection:
            return connection.exec_driver_sql(statement).scalar()

    def wait_for(self, statement: str, wanted: object) -> None:
        """Wait until the query *statement* returns *wanted*."""
        deadline = time.monotonic() + _PATIENCE
        while (found := self.scalar(statement)) != wanted:
            assert time.monotonic() < deadline, f"{statement}: {found}"
            time.sleep(0.02)


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
    with servers._directory() as directory, ExitStack() as stack:
        (directory / "a").mkdir()
        (directory / "b").mkdir()
        made = servers.initialized(directory / "a" / "data")
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
        first.wait_for("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'", 1)
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
