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

# Tests that run on files by default, and on servers under `make soak`: their transactions are those
# of tests that run on servers.
_ON_FILES = {
    "test_all_users_of_an_app_are_listed",
    "test_another_backend_stores_the_next_generation_in_the_key_database",
    "test_every_key_is_replaced",
    "test_rows_of_both_databases_are_counted_and_checked_in_several_batches",
    "test_users_whose_keys_were_removed_are_rejected_and_get_no_new_ones",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("pair") == ON_SERVERS[0] and getattr(item, "originalname", "") in _ON_FILES:
            item.add_marker(pytest.mark.soak)


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
