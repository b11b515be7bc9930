"""ADK's contract behind `EncryptedSessionWrapper`, as far as the wrapped service keeps it."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.conformance.services import WRAPPERS, Kind
from tests.conformance.support import each_kind
from tests.integrations.inner_services import FerretDB, ferretdb


def tests_of(*subjects: str) -> dict[str, Any]:
    modules = [import_module(f"tests.conformance.test_{subject}") for subject in subjects]
    return {n: f for one in modules for n, f in vars(one).items() if n.startswith("test_")}


# What a service returns for one call after the other.
CALLS = tests_of(
    *("append", "create", "delete", "events", "get", "list", "stale"),
    *("state_scopes", "state_values", "user_state"),
)
globals().update(CALLS | tests_of("concurrency", "runner"))

# The tests that fail behind the wrapper, and why.
SESSION_IDS = {
    "test_odd_id_is_kept_wherever_it_stands",
    "test_ids_that_look_alike_are_told_apart",
    "test_empty_session_id_is_rejected_when_taken",
    "test_sessions_of_one_update_time_are_listed_by_user_then_id",
}
NO_MARKER = {
    "test_marker_follows_every_append",
    "test_new_session_has_the_ids_and_the_state_it_was_given",
    "test_live_session_equals_its_reload_after_appends",
    "test_exactly_one_of_many_copies_wins",
    "test_copy_from_creation_is_stale_after_many_appends",
    "test_handle_from_before_deletion_stays_stale_for_the_recreated_session",
    "test_listed_copy_is_stale_after_an_append",
    "test_one_of_two_services_detects_the_others_write",
    "test_rejected_event_is_accepted_after_a_reload",
    "test_session_that_went_through_json_is_accepted",
    "test_stale_copy_is_rejected_and_changes_nothing_but_temp_keys",
}
LONE_SURROGATES = {"test_odd_text_comes_back_wherever_it_stands"}
RECREATED = {
    "test_handle_from_before_deletion_stays_stale_for_the_recreated_session",
    "test_session_deleted_by_one_service_is_gone_for_another",
}
OF_ALL = [(SESSION_IDS, "some services change such ids, so the wrapper rejects them")]
OF_KIND = {
    "wrapped-memory": [(NO_MARKER, "the service accepts stale session objects")],
    "wrapped-sqlite": [
        (NO_MARKER, "the service detects stale session objects by their time only"),
        (LONE_SURROGATES, "the service cannot store the author or the invocation id"),
    ],
    "wrapped-database": [],
    "wrapped-mongodb": [
        (RECREATED, "the service's marker begins at 0 again if a session is recreated"),
        (LONE_SURROGATES, "the service cannot store the author or the invocation id"),
    ],
}
# By default also on ADK's service with a database: what needs two services, several readers and
# writers at once, or the order, the selection and the deletion of rows.
ON_A_DATABASE = NO_MARKER | {
    "test_append_racing_a_deletion_succeeds_or_finds_no_session",
    "test_config_selects_events_by_time_then_the_last_ones",
    "test_conversation_goes_on_in_another_process",
    "test_deleted_session_is_gone",
    "test_event_at_exactly_the_bound_is_selected",
    "test_event_of_two_megabytes_is_stored",
    "test_events_of_a_conversation_come_back_equal",
    "test_exactly_one_of_many_creators_of_one_id_wins",
    "test_json_value_comes_back",
    "test_many_sessions_of_many_users_at_once_stay_apart",
    "test_odd_text_comes_back_wherever_it_stands",
    "test_parallel_appends_through_one_session_object_all_arrive_in_order",
    "test_parallel_branches_append_through_one_session_object",
    "test_rich_value_is_coerced_at_creation_and_in_storage_on_append",
    "test_sessions_update_time_becomes_the_events",
    "test_tool_keeps_state_in_every_scope",
    "test_two_services_changing_different_shared_keys_at_once_lose_none",
}

_kind = each_kind(
    some={"wrapped-memory": CALLS, "wrapped-database": ON_A_DATABASE},
    soak=["wrapped-sqlite", "wrapped-mongodb"],
)


@pytest.fixture(scope="session")
def ferretdb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FerretDB]:
    with ferretdb(tmp_path_factory.mktemp("ferretdb")) as server:
        yield server


def failures(name: str, test: str) -> list[str]:
    """Return why *test* is expected to fail on the kind *name*."""
    return [why for tests, why in OF_ALL + OF_KIND[name] if test in tests]


@pytest.fixture
def kind(_kind: Kind, request: pytest.FixtureRequest) -> Kind:
    name = next(name for name, one in WRAPPERS.items() if one is _kind)
    for why in failures(name, request.node.originalname):
        request.applymarker(pytest.mark.xfail(reason=why, strict=False))
    return _kind


pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
