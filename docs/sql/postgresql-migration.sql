-- The table that `migrate` adds to the data tables of adk-secure-sessions, for PostgreSQL.
-- Run this script once, with the account that is to own the tables.  Grant SELECT, INSERT, UPDATE
-- and DELETE on the tables to the service's account, and pass create_tables=False to the service.

CREATE TABLE secure_migrated (
  tag BYTEA NOT NULL,
  row_id BIGINT NOT NULL,
  number BIGINT NOT NULL,
  source BYTEA NOT NULL,
  seal BYTEA NOT NULL,
  PRIMARY KEY (tag)
);
