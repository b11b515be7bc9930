"""What connects this package to the rest of ADK: artifacts, memory, its command line."""
