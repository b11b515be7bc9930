"""AES-256-GCM from the `cryptography` library, and the ciphers of adk-secure-sessions 1.x."""
