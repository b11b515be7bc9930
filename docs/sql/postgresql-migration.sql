-- The table that `migrate` adds to the data tables of adk-secure-sessions, for PostgreSQL.
-- Run this script once, with the account that is to own the tables.
-- Pass create_tables=False to the service.
-- The script grants permissions to the role secure_service.  Create this role first, and grant it to
-- the account of the service.

CREATE TABLE secure_migrated (
  tag BYTEA NOT NULL,
  row_id BIGINT NOT NULL,
  number BIGINT NOT NULL,
  source BYTEA NOT NULL,
  seal BYTEA NOT NULL,
  PRIMARY KEY (tag)
);

GRANT SELECT, INSERT, UPDATE, DELETE ON secure_migrated TO secure_service;
