"""How transactions ask the database, and the executors that answer; nothing of encryption or ADK.

- `protocol`: what a transaction yields (`Read`, `Apply`), and what every executor promises.
- `connect`: from a URL or an engine to its executor.
- `sqlite`: SQLite by URL, on threads of our own.
- `postgresql`, `postgresql_sql`: PostgreSQL by asyncpg, one statement for each read and write.
- `async_engine`: every other database and engine, by SQLAlchemy.
- `dialects`: SQL and error codes that differ between databases.
"""
