"""The stored bytes of records, contexts, states and events.  Nothing here uses a database."""
