"""Read and write the encrypted tables.  docs/architecture.md says what each module is about."""
