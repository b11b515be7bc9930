"""The executors, which run transactions on a database.  They use neither encryption nor ADK.

- `protocol`: the requests that a transaction yields (`Read`, `Apply`), and the class `Executor`.
- `connect`: creates the executor for a URL or an engine.
- `sqlite`: SQLite databases given by URL, on our own threads.
- `postgresql`, `postgresql_sql`: PostgreSQL with asyncpg, one statement for each read and write.
- `async_engine`: every other database and engine, with SQLAlchemy.
- `dialects`: SQL text and locks that differ between databases.
- `failures`: translates the errors of drivers.
"""
