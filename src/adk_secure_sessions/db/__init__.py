"""Running statements: how a transaction asks, and the executors that answer; no encryption."""
