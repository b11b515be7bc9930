"""The sizes and counts of all benchmarks; the page shows the same values."""

import os
from typing import Any

from adk_secure_sessions import Audit, Packing

# Round trips: size of the state as JSON, in bytes.
PAYLOADS = {"{}": 2, "1KB": 1_000, "10KB": 10_000, "100KB": 100_000}
ITERATIONS, BATCH, WARM_UPS = 30, 10, 5

# Backends alone: size of the value, in bytes.
SIZES = {
    "50B": 50,
    "350B": 350,
    "1KB": 1_000,
    "5KB": 5_000,
    "10KB": 10_000,
    "100KB": 100_000,
    "1MB": 1_000_000,
}
DIRECTIONS = ("encrypt", "decrypt")
RECORDS = ("0B", "50B", "350B", "1KB", "10KB")
RECORD_SIZES = {"0B": 0, **SIZES}

# Conversations: rounds by number of concurrent conversations; turns, each of four events.
CONVERSATION_ROUNDS, TURNS = {1: 12, 10: 9, 50: 6}, 10
CONVERSATION_OPERATIONS = ("create", "append", "get")

# Bulk reads and concurrency.
FIELDS = 100  # values to decrypt
BULK_READS = ("get, 1000 events", "list, 1000 sessions")
LARGE_READ = 5000  # events
TASKS, APPENDS = 50, 10  # concurrent tasks, and events that each appends

# Keys.
FEW_USERS, MANY_USERS = 10, 100_000  # with one session each
KEY_SERVICE_DELAY = 0.05  # seconds until the key service answers
KEY_OPERATIONS = 10_000

# A new process: the events of the session that it gets.
COLD_EVENTS = 20
# Blobs of artifacts: sizes in bytes, and the goals for one of 1 MB over HTTP.
BLOBS = {"100KB": 100_000, "1MB": 1_000_000, "10MB": 10_000_000}
BLOB_STORES = ("directory", "s3")
BLOB_GOALS = {"upload": 0.5, "download": 0.3}  # seconds
BLOB_OVERHEAD = 1.10

# ADK's memory: entries of one user, and the words of each query.
MEMORY_ENTRIES = 10_000
MEMORY_QUERIES = {
    "a rare word": "word4321",
    "a question of nine words": " ".join(f"word{n}" for n in (0, 1, 3, 9, 27, 81, 243, 729, 2187)),
    "a word of all entries": "word0",
}
MEMORY_SEARCH_GOAL = 0.020  # seconds, with a warm cache

# `EncryptedSessionWrapper` before ADK's `DatabaseSessionService`.
WRAPPER_OPERATIONS = ("create", "append", "get, 20 events")

# Growth, size and memory.
EVENTS = (10, 100, 1000, 10_000)
STORED_EVENTS, STORED_SESSIONS = 1000, {"{}": 1000, "1KB": 500, "10KB": 100, "100KB": 40}
# The cache of events: all events of the session are cached.
HISTORY_EVENTS, HISTORY_GOAL_EVENTS = (100, 1000, 10_000), 1000
# The sessions that are moved in and out, and the events of each.
MIGRATED_SESSIONS, MIGRATED_EVENTS = 500, 20
MIGRATION_GOAL = 2.0  # time relative to a plain copy of the same rows

# Sessions by a value of their state: all sessions, and how many one search finds.
SEARCHED_SESSIONS, SEARCH_HITS = 100_000, 10
SEARCH_GOAL = 0.005  # seconds

# Compression and padding: the arguments of each side.
PACKING: dict[str, dict[str, Packing]] = {
    "neither": {},
    "zlib": {"packing": Packing("zlib")},
    "padding": {"packing": Packing(padding="padme")},
    "zlib and padding": {"packing": Packing("zlib", "padme")},
}
PACKED_SIZES = ("conversation", "session, 100KB")
PACKED_CONVERSATIONS, PACKED_SESSIONS = 40, 40

# Telemetry: which providers are set, and the method of each operation.  Pairs of CPU times, each of
# several operations.
TELEMETRY_OFF, TELEMETRY_METRICS, TELEMETRY_TRACES = "none", "metrics", "metrics and spans"
TELEMETRY = (TELEMETRY_OFF, TELEMETRY_METRICS, TELEMETRY_TRACES)
TELEMETRY_OPERATIONS = {"append": "append_event", "get, 20 events": "get_session"}
TELEMETRY_PAIRS, TELEMETRY_REPEATS = 3000, 10

# The audit log, and the trail beside it: the arguments of each side, and the operations.
NO_AUDIT, AUDIT_LOG, AUDIT_TRAIL = "no audit", "log", "log and trail"
AUDIT: dict[str, dict[str, Any]] = {
    NO_AUDIT: {},
    AUDIT_LOG: {"audit": Audit("blind")},
    AUDIT_TRAIL: {"audit": Audit("blind", table=True)},
}
AUDITED = ("append", "get, 5 events")

# Scaling: processes that append at once; rows of events in PostgreSQL, by layout of the tables.
PROCESSES, SCALING_TASKS = (1, 2, 4), 25
FEW_EVENTS = 10_000
MANY_EVENTS = int(os.environ.get("BENCH_EVENTS", "10_000_000"))
LAYOUTS = {"one table": "postgresql", "partitioned": "postgresql-partitioned"}  # files in docs/sql
SCALING_OPERATIONS = ("append", "get, 100 events")
SCALING_GOAL = 1.10
