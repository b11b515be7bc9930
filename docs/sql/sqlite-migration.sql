-- The table that `migrate` adds to the data tables of adk-secure-sessions, for SQLite.
-- Run this script once.
-- Pass create_tables=False to the service.

CREATE TABLE secure_migrated (
  tag BLOB NOT NULL,
  row_id BIGINT NOT NULL,
  number BIGINT NOT NULL,
  source BLOB NOT NULL,
  seal BLOB NOT NULL,
  PRIMARY KEY (tag)
)
 WITHOUT ROWID;
