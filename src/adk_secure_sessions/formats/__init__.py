"""Bytes as they are stored: records and their contexts, states and events; no database."""
