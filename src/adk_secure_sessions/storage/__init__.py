"""Read and write the encrypted tables.  The first lines of each module say what it is about."""
