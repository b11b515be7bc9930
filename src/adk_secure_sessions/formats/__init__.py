"""The stored bytes: records and their contexts, states, events.  Nothing here uses a database."""
