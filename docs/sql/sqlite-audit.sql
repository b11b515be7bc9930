-- The table that `Audit(table=True)` adds to the data tables of adk-secure-sessions, for SQLite.
-- Run this script once.
-- Pass create_tables=False to the service.

CREATE TABLE secure_audit (
  chain BLOB NOT NULL,
  number BIGINT NOT NULL,
  time BIGINT NOT NULL,
  record BLOB NOT NULL,
  PRIMARY KEY (chain, number)
)
 WITHOUT ROWID;
