"""Integrations with the rest of ADK: artifacts, memory and ADK's command line."""
