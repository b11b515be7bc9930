-- The table that the search index adds to the data tables of adk-secure-sessions, for SQLite.
-- Run this script once.
-- Pass create_tables=False to the service.

CREATE TABLE secure_state_index (
  row_id BIGINT NOT NULL,
  key_tag BLOB NOT NULL,
  value_tag BLOB NOT NULL,
  PRIMARY KEY (row_id, key_tag)
)
 WITHOUT ROWID;

CREATE INDEX ix_secure_state_index_value_tag ON secure_state_index (value_tag);
