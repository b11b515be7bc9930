"""Root keys and their providers, master keys, data keys, blind indexes."""
