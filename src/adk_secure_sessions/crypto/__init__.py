"""Cryptographic primitives, all from `cryptography`, and the base class of key objects."""
