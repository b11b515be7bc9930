"""The section on injected faults in docs/benchmarks.md, from the outcomes of `make reliability`."""

from pathlib import Path

from tests.benchmarks.markdown import markdown_table, rendered
from tests.benchmarks.results import quantity
from tests.reliability.results import Outcome, Record

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "reliability" / "results.json"
TEMPLATE = Path(__file__).with_name("page.md")
NOT_RUN = "not run"
# What names of outcomes say after the slash.
DATABASES = {
    "sqlite": "SQLite",
    "postgresql": "PostgreSQL",
    "postgresql, psycopg": "psycopg",
    "mariadb": "MariaDB",
    "vault": "Vault's API",
}
# The sections of the page: what names of outcomes say before the slash, and the page's words.
KILLS = {"kill -9": "a writing process is killed"}
FILES = {
    "full disk": "the disk is full",
    "file deleted": "the file is deleted",
    "file moved": "the file is moved away, and moved back",
    "file replaced by older copy": "the file is replaced by an older copy",
    "file replaced by another database": "the file is replaced by another database",
    "file replaced by empty file": "the file is replaced by an empty file",
    "read-only file": "the file is read-only",
    "read-only file and directory": "the file and its directory are read-only",
    "file locked": "another program holds the write lock",
    "damaged pages": "bytes of the file are overwritten, or the file is cut off",
    "damaged log": "bytes of the write-ahead log are overwritten",
}
SERVERS = {
    "restart during traffic": "the server is restarted while six tasks write",
    "server down": "the server is down",
    "connections ended": "the server ends all connections between two operations",
    "connection cut": "a connection is cut during an operation, at each of its messages in turn",
    "pool exhausted": "no connection of the pool is free within the time-out",
    "slow server": "the server's answers do not arrive",
    "pause of the server": "the server's answers arrive late",
    "statement time-out": "the server's own time limit ends statements",
    "read-only server": "the server becomes read-only",
    "deadlock, append": "an append meets a deadlock",
    "deadlock, create": "a creation meets a deadlock",
    "deadlock, delete": "a deletion meets a deadlock",
}
KEY_SERVICES = {
    "key service slow": "answers later than the time-out",
    "key service throttling": "answers 429 to every call",
    "key service revoked": "rejects the token",
}
CLOCKS = {"clock jumps": "the clock jumps, by up to 10,000 days"}
TRAFFIC = "mixed traffic"
_DONE = (
    "root keys rotated",
    "data keys rotated",
    "records re-encrypted",
    "sessions purged",
    "users erased",
    "sessions migrated",
)
_SIZES = {
    "10,000 events": ("write", "read", "read the last 20"),
    "10,000 state keys": ("write", "change one key", "read"),
    "an event of 20 MB": ("write", "read"),
}


def render(record: Record) -> str:
    """Return the text of the section."""
    return rendered(
        TEMPLATE,
        results=Report(record),
        kills=KILLS,
        files=FILES,
        servers=SERVERS,
        key_services=KEY_SERVICES,
        clocks=CLOCKS,
    )


class Report:
    """The numbers and tables that the template inserts."""

    def __init__(self, record: Record) -> None:
        self.machine, self.versions = record.machine, record.versions
        self._outcomes, self._figures = record.outcomes, record.figures

    def total(self, prefix: str, field: str) -> str:
        """Return the sum of a number of all outcomes whose names begin so."""
        found = [one for name, one in self._outcomes.items() if name.startswith(prefix)]
        return f"{sum(getattr(one, field) for one in found):,}"

    def sum_of(self, prefix: str) -> str:
        """Return the sum of all figures whose names begin so."""
        found = [one.value for name, one in self._figures.items() if name.startswith(prefix)]
        return f"{sum(found):,.0f}"

    def number(self, name: str) -> str:
        """Return a figure, or that it was not measured."""
        return self._figures[name].text if name in self._figures else NOT_RUN

    def of(self, prefix: str) -> list[tuple[str, Outcome]]:
        """Return the outcomes of one fault, with their databases."""
        found = {
            database: self._outcomes[name]
            for database, name in ((one, f"{prefix}/{one}") for one in DATABASES)
            if name in self._outcomes and self._outcomes[name].times
        }
        return [(DATABASES[database], outcome) for database, outcome in found.items()]

    def faults(self, labels: dict[str, str]) -> str:
        """Return a table with the sums and the longest pause of each fault, of all databases."""
        rows = []
        for prefix, label in labels.items():
            found = self.of(prefix)
            databases = ", ".join(database for database, _ in found)
            outcomes = [outcome for _, outcome in found]
            rows.append([label, databases, *(_cells(outcomes) if found else [NOT_RUN, *[""] * 4])])
        heading = ["fault", "database", "faults", "acknowledged writes", "lost or doubled"]
        return markdown_table([*heading, "the application sees", "works again after"], rows)

    def endurance(self) -> str:
        """Return the table of the mixed traffic, with a column for each database."""
        found = self.of(TRAFFIC)
        names = {label: name for name, label in DATABASES.items()}

        def row(label: str, *figures: str) -> list[str]:
            cells = [
                " → ".join(self.number(f"{TRAFFIC}/{names[database]}/{one}") for one in figures)
                for database, _ in found
            ]
            return [label, *cells]

        rows = [
            row("duration", "duration"),
            row("processes", "processes"),
            ["acknowledged writes", *(f"{one.acknowledged:,}" for _, one in found)],
            ["lost or doubled", *(f"{one.lost + one.doubled}" for _, one in found)],
            *(row(name, name) for name in _DONE),
            row("largest memory of a writer: after a quarter, and at the end", *_ends("memory")),
            row("file descriptors of a writer: after a quarter, and at the end", *_ends("files")),
        ]
        return markdown_table(["", *(database for database, _ in found)], rows)

    def longest(self) -> str:
        """Return how long the longest run of mixed traffic was."""
        names = [name for name in self._figures if name.endswith("/duration")]
        longest = max((self._figures[name].value for name in names), default=0.0)
        return f"{longest / 60:.0f} minutes" if longest >= 60 else quantity(longest, unit="s")

    def sizes(self) -> str:
        """Return the table of large sessions."""
        rows = []
        for what, steps in _SIZES.items():
            for step in steps:
                databases = ("sqlite", "postgresql", "mariadb")
                names = (f"limits/{database}/{what}/{step}" for database in databases)
                rows.append([f"{what}: {step}", *map(self.number, names)])
            name = f"limits/sqlite/{what}/read, memory"
            rows.append([f"{what}: peak memory of a read", self.number(name), "", ""])
        return markdown_table(["", "SQLite", "PostgreSQL", "MariaDB"], rows)


def _ends(what: str) -> tuple[str, str]:
    return f"{what} after a quarter", f"{what} at the end"


def _cells(outcomes: list[Outcome]) -> list[str]:
    pauses = [one.pause for one in outcomes if one.pause is not None]
    acknowledged = sum(one.acknowledged for one in outcomes)
    return [
        f"{sum(one.times for one in outcomes):,}",
        f"{acknowledged:,}" if acknowledged else "",
        f"{sum(one.lost + one.doubled for one in outcomes)}" if acknowledged else "",
        "<br>".join(sorted({error for one in outcomes for error in one.errors})) or "no error",
        quantity(max(pauses), unit="s") if pauses else "",
    ]
