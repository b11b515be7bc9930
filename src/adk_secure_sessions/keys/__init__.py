"""The key hierarchy (root keys, master keys, data keys) and the blind indexes."""
