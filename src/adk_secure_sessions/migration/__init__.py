"""Copy sessions into a database of this package, and out of it."""
