"""A cluster of three MariaDB Galera nodes on the loopback interface.

How it works: the fixture `galera` (tests/conftest.py) is a `Server` whose `database()` creates a
database on all nodes and returns the URL on the first.  `on(url, n)` is the same database on node
*n*, counted from 0.  Clients connect through Unix sockets, the nodes through free TCP ports of
127.0.0.1.  They begin with copies of one directory, so a node that joins needs only the changes
that it has missed, which Galera sends (IST).  MariaDB runs a script for each join; ours only passes
on the position from which the node needs changes.
"""

import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import sqlalchemy as sa

from tests.servers import (
    _MARIADB_OPTIONS,
    MariaDB,
    _directory,
    _initialize,
    _is_root,
    _running,
    unavailable,
)

NODES = 3
_PROVIDERS = ("/usr/lib/galera/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so")
_OPTIONS = (
    "--wsrep-on=ON",
    "--wsrep-cluster-name=test",
    "--wsrep-node-address=127.0.0.1",
    "--wsrep-sst-method=none_but_ist",
    "--binlog-format=ROW",
    "--innodb-autoinc-lock-mode=2",
    "--max-connections=200",
)
# The time-outs are shorter than the defaults, after which a node that was killed is given up.
_PROVIDER_OPTIONS = (
    "gcache.size=32M;evs.keepalive_period=PT0.5S;evs.inactive_check_period=PT0.5S;"
    "evs.suspect_timeout=PT3S;evs.inactive_timeout=PT8S;evs.install_timeout=PT8S;"
    "pc.recovery=FALSE"
)
# The address of a joining node is a file, to which the donor writes the position.
_SCRIPT = """\
#!/bin/sh
parent=$PPID
while [ $# -gt 0 ]; do
  case "$1" in
    --role) role=$2;;
    --address) address=$2;;
    --gtid) position=$2;;
    --bypass) bypass=1;;
  esac
  shift
done
if [ "$role" = donor ]; then
  [ -n "$bypass" ] || exit 22  # the node would need a copy of all data
  echo "$position" > "$address.new" && mv "$address.new" "$address" && echo "done $position"
  exit
fi
file={directory}/position-$$
echo "ready $file"
while [ ! -e "$file" ]; do kill -0 "$parent" || exit 32; sleep 0.05; done
cat "$file"
rm "$file"
"""
_RECOVERED = re.compile(r"Recovered position:? *([0-9a-f-]{36}:-?\d+)")


class Node(MariaDB):
    """One node; `crash` kills it, and `start` lets it join the others again."""

    def __init__(self, number: int, directory: Path, command: Sequence[str]) -> None:
        self.address = directory / str(number) / "socket"
        super().__init__(
            sa.URL.create("mariadb+pymysql", "root", query={"unix_socket": str(self.address)}),
            directory / str(number),
        )
        self._command = [*command, f"--datadir={self.data}", f"--socket={self.address}"]
        self._command += [f"--tmpdir={self.directory}"]  # of its own: `servers.mariadb` says why

    @property
    def data(self) -> Path:
        assert self.directory is not None
        return self.directory / "data"

    def command(self, *options: str) -> list[str]:
        return [*self._command, *options]

    def start(self) -> None:
        """Start the node after it has crashed or stopped; wait until it has joined the others."""
        found = subprocess.run(
            self.command("--wsrep-recover"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        position = _RECOVERED.search(found.stdout)
        assert position, found.stdout[-2000:]
        assert self.process is not None
        self.process.command = self.command(f"--wsrep-start-position={position[1]}")
        super().start()

    def status(self, name: str) -> str:
        with self.admin.connect() as connection:
            rows = connection.exec_driver_sql(f"SHOW GLOBAL STATUS LIKE '{name}'").all()
        return str(rows[0][1])


class Galera(MariaDB):
    """All nodes; as a `Server`, it is the first node."""

    def __init__(self, nodes: list[Node]) -> None:
        super().__init__(nodes[0].admin_url, nodes[0].directory)
        self.nodes = nodes

    def on(self, url: sa.URL, number: int) -> sa.URL:
        """Return the URL of the same database on node *number* (modulo the number of nodes)."""
        address = str(self.nodes[number % len(self.nodes)].address)
        return url.update_query_dict({"unix_socket": address})

    @contextmanager
    def applies_nothing(self, number: int) -> Iterator[None]:
        """During the block, node *number* applies no changes of other nodes.

        Its own transactions run, and wait in their COMMIT until the end of the block.
        """
        # An explicit lock is one that Galera does not break.  A change of another node waits for
        # this lock, and all later changes wait for their turn.
        name = f"blocked_{secrets.token_hex(4)}"
        with self.admin.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
            connection.exec_driver_sql(f"CREATE TABLE {name}.t (id INT PRIMARY KEY)")
        node, other = (self.nodes[(number + n) % len(self.nodes)] for n in (0, 1))
        with node.admin.connect() as locked, other.admin.connect() as writer:
            try:
                for waiting in (locked, writer):  # until this node has the table, too
                    waiting.exec_driver_sql("SET SESSION wsrep_sync_wait = 15")
                    waiting.exec_driver_sql(f"SELECT * FROM {name}.t").close()
                    waiting.exec_driver_sql("SET SESSION wsrep_sync_wait = 0")
                locked.exec_driver_sql(f"LOCK TABLES {name}.t READ")
                writer.exec_driver_sql(f"INSERT INTO {name}.t VALUES (1)")
                yield
            finally:
                locked.exec_driver_sql("UNLOCK TABLES")
                writer.exec_driver_sql(f"DROP DATABASE {name}")

    def _empty(self, connection: sa.Connection, name: str) -> None:
        # Before each DELETE, wait for the last changes of connections to other nodes that were
        # killed.  The first node would otherwise apply them afterwards.
        connection.exec_driver_sql("SET SESSION wsrep_sync_wait = 15")
        super()._empty(connection, name)
        connection.exec_driver_sql("SET SESSION wsrep_sync_wait = 0")

    def _end_all(self, name: str) -> None:
        for node in self.nodes:
            node.kill(node.admin_url.set(database=name))


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def galera_cluster() -> Iterator[Galera]:
    """Start three nodes, or skip the test if Galera is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
    program, install = shutil.which("mariadbd", path=path), shutil.which("mariadb-install-db")
    provider = next((one for one in _PROVIDERS if Path(one).exists()), None)
    if not (program and install and provider):
        unavailable(
            "no MariaDB with Galera here: on Debian, apt-get install --no-install-recommends "
            "mariadb-server-core mariadb-client-core galera-4"
        )
    ports = _free_ports(2 * NODES)
    members = ",".join(f"127.0.0.1:{port}" for port in ports[:NODES])
    with _directory() as directory, ExitStack() as stack:
        script = directory / "wsrep_sst_none_but_ist"
        script.write_text(_SCRIPT.replace("{directory}", str(directory)))
        script.chmod(0o755)
        common = ["--no-defaults", "--innodb-use-native-aio=0"]
        common += ["--user=root"] if _is_root() else []
        nodes = []
        for number in range(NODES):
            listen, receive = ports[number], ports[NODES + number]
            command = ["env", f"PATH={directory}:{path}", program, *common, "--skip-networking"]
            command += [*_MARIADB_OPTIONS, *_OPTIONS, f"--wsrep-provider={provider}"]
            command += [
                f"--wsrep-cluster-address=gcomm://{members}",
                f"--wsrep-node-name=n{number}",
            ]
            command += [
                f"--wsrep-provider-options=gmcast.listen_addr=tcp://127.0.0.1:{listen};"
                f"ist.recv_addr=127.0.0.1:{receive};{_PROVIDER_OPTIONS}"
            ]
            (directory / str(number)).mkdir()
            nodes.append(Node(number, directory, command))
        data = directory / "0" / "data"
        options = [
            *common,
            f"--datadir={data}",
            f"--tmpdir={data.parent}",
            "--skip-test-db",
            "--skip-name-resolve",
        ]
        _initialize([install, *options], data)
        first, *others = nodes
        begin = first.command("--wsrep-new-cluster")
        with _running(first, first.address, begin):
            pass  # now the data contains a position in the history of the cluster
        for node in others:
            ignored = shutil.ignore_patterns("galera.cache")
            shutil.copytree(data, node.data, ignore=ignored)
        stack.enter_context(_running(first, first.address, begin))
        with ExitStack() as joining:
            for node in others:
                start = _running(node, node.address, node.command())
                thread = threading.Thread(target=stack.enter_context, args=(start,))
                thread.start()
                joining.callback(thread.join)
        assert first.status("wsrep_cluster_size") == str(NODES)
        yield Galera(nodes)
