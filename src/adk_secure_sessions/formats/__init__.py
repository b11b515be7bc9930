"""The byte formats of records, contexts, states and events.  Nothing here uses a database."""
