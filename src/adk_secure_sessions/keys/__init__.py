"""The key hierarchy: providers of root keys, master keys, data keys; and the blind indexes."""
