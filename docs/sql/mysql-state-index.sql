-- The table that the search index adds to the data tables of adk-secure-sessions, for MySQL and MariaDB.
-- Run this script once, with the account that is to own the tables.
-- Pass create_tables=False to the service.
-- The script grants permissions to the role secure_service.  Create this role first, and grant it to
-- the account of the service.

CREATE TABLE secure_state_index (
  row_id BIGINT NOT NULL,
  key_tag VARBINARY(16) NOT NULL,
  value_tag VARBINARY(16) NOT NULL,
  PRIMARY KEY (row_id, key_tag)
) ENGINE=InnoDB;

CREATE INDEX ix_secure_state_index_value_tag ON secure_state_index (value_tag);

GRANT SELECT, INSERT, UPDATE, DELETE ON secure_state_index TO secure_service;
