"""Goals: the highest ratio each operation should have relative to ADK and to the floor.

ADK is its `DatabaseSessionService`, which stores plaintext.  The floor is in `floor.py`.
"""

from typing import NamedTuple


class Budget(NamedTuple):
    """Highest time relative to ADK and to the floor; None where there is no goal."""

    adk: float | None = None
    floor: float | None = None


BUDGETS: dict[str, dict[str, Budget]] = {
    "sqlite": {
        "create, state 1 KB": Budget(0.20, 1.55),
        "create, state 100 KB": Budget(0.42, 1.2),
        "append, state 1 KB": Budget(0.12, 1.55),
        "append, state 100 KB": Budget(0.12, 1.55),
        "delete, 20 events": Budget(0.15, 1.35),
        "get, 0 events": Budget(0.03),
        "get, 20 events": Budget(0.15, 1.1),
        "get, 100 events": Budget(0.40),
        "get, 1000 events": Budget(0.70),
        "get, 5000 events": Budget(),
        "list, 10 sessions": Budget(0.10),
        "list, 100 sessions": Budget(0.20),
        "list, 1000 sessions": Budget(0.30),
        "50 tasks appending": Budget(1 / 20, 0.89),
    },
    "postgresql": {
        "create, state 1 KB": Budget(0.20, 1.4),
        "create, state 100 KB": Budget(0.40, 1.2),
        "append, state 1 KB": Budget(0.13, 1.35),
        "append, state 100 KB": Budget(0.13, 1.35),
        "delete, 20 events": Budget(0.25, 1.5),
        "get, 0 events": Budget(0.09),
        "get, 20 events": Budget(0.22),
        "get, 100 events": Budget(0.45),
        "get, 1000 events": Budget(0.66),
        "get, 5000 events": Budget(),
        "list, 10 sessions": Budget(0.17),
        "list, 100 sessions": Budget(0.23),
        "list, 1000 sessions": Budget(0.26),
        "50 tasks appending": Budget(1 / 6),
    },
}
FIELDS_OPENED = 0.005  # seconds to decrypt all `plan.FIELDS` values
KEY_SERVICE_CALLS = 4  # for a start and any number of operations after it
GROWTH = 1.25  # time at the largest size relative to the smallest
CIPHER_COST = {"sqlite": 1.08, "postgresql": 1.06}  # CPU time relative to no-op
EVENT_LOOP_STALL = 0.005  # seconds that a read of 5000 events may block the event loop
LARGE_READ_MEMORY = 1.5  # peak memory of that read relative to ADK
HISTORY_CACHE = 0.05  # time of a read with cached events relative to ADK, plan.HISTORY_GOAL_EVENTS
# CPU time relative to the service without telemetry, and to the same number of bare SDK calls.
TELEMETRY_OFF, TELEMETRY_ON = 1.01, 1.02
