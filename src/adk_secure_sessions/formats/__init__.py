"""The byte formats of records, contexts, states, events, items and blobs.

Nothing here uses a database.
"""
