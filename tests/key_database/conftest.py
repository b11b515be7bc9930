from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.key_database.support import Pair, empty_pair, pair_in

# The data's database and that of the keys.
ON_SERVERS = ["postgresql mariadb", "mariadb postgresql"]
MIXED = ["sqlite postgresql", "mariadb sqlite"]

# The tests that run on servers by default: they contain the transactions of the others.
_ON_SERVERS = {
    "test_each_database_gets_its_tables_and_a_mark_of_what_it_holds",
    "test_erased_user_is_gone_from_both_databases",
    "test_keys_move_into_a_key_database_and_back",
    "test_lost_connections_to_both_databases_are_opened_again",
    "test_processes_that_are_the_first_of_a_user_agree_on_one_key",
    "test_service_does_all_it_does_without_a_key_database",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        name = getattr(item, "originalname", "")
        if params.get("pair") == ON_SERVERS[0] and name not in _ON_SERVERS:
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
    with empty_pair(request, tmp_path) as found:
        yield found
