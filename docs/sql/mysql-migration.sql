-- The table that `migrate` adds to the data tables of adk-secure-sessions, for MySQL and MariaDB.
-- Run this script once, with the account that is to own the tables.
-- Pass create_tables=False to the service.
-- The script grants permissions to the role secure_service.  Create this role first, and grant it to
-- the account of the service.

CREATE TABLE secure_migrated (
  tag VARBINARY(16) NOT NULL,
  row_id BIGINT NOT NULL,
  number BIGINT NOT NULL,
  source VARBINARY(16) NOT NULL,
  seal VARBINARY(16) NOT NULL,
  PRIMARY KEY (tag)
) ENGINE=InnoDB;

GRANT SELECT, INSERT, UPDATE, DELETE ON secure_migrated TO secure_service;
