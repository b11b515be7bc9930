from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.key_database.support import Pair, pair_in
from tests.servers import Server

# The data's database and that of the keys.
ON_SERVERS = ["postgresql mariadb", "mariadb postgresql"]
MIXED = ["sqlite postgresql", "mariadb sqlite"]


@pytest.fixture
def files(tmp_path: Path) -> Pair:
    return pair_in(tmp_path)


@pytest.fixture(
    params=[
        "sqlite sqlite",
        ON_SERVERS[0],
        *(pytest.param(name, marks=pytest.mark.soak) for name in (*ON_SERVERS[1:], *MIXED)),
    ]
)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two empty databases, of one kind or of two."""
    with ExitStack() as stack:

        def place(kind: str, name: str) -> sa.URL:
            if kind == "sqlite":
                return sa.URL.create("sqlite", database=f"{tmp_path}/{name}.db")
            server: Server = request.getfixturevalue(kind)
            return stack.enter_context(server.database())

        data, keys = request.param.split()
        yield Pair(place(data, "data"), place(keys, "keys"))
