"""ADK's contract behind `EncryptedSessionWrapper`, as far as the wrapped service keeps it."""

from tests.conformance import (
    test_append,
    test_concurrency,
    test_create,
    test_delete,
    test_events,
    test_get,
    test_list,
    test_runner,
    test_stale,
    test_state_scopes,
    test_state_values,
    test_user_state,
)
from tests.conformance.services import WRAPPERS
from tests.conformance.support import each_kind

MODULES = [
    test_append,
    test_concurrency,
    test_create,
    test_delete,
    test_events,
    test_get,
    test_list,
    test_runner,
    test_stale,
    test_state_scopes,
    test_state_values,
    test_user_state,
]
for _module in MODULES:
    globals().update({n: f for n, f in vars(_module).items() if n.startswith("test_")})

kind = each_kind(*WRAPPERS)
