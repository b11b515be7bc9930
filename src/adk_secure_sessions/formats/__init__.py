"""The bytes that storage holds: records and their contexts, states, events.  No database."""
