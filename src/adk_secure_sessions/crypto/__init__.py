"""AES-256-GCM from the `cryptography` library, and the base class of objects that contain keys."""
