-- The table that `Audit(table=True)` adds to the data tables of adk-secure-sessions, for MySQL and MariaDB.
-- Run this script once, with the account that is to own the tables.
-- Pass create_tables=False to the service.
-- The script grants permissions to the role secure_service.  Create this role first, and grant it to
-- the account of the service.

CREATE TABLE secure_audit (
  chain VARBINARY(16) NOT NULL,
  number BIGINT NOT NULL,
  time BIGINT NOT NULL,
  record LONGBLOB NOT NULL,
  PRIMARY KEY (chain, number)
) ENGINE=InnoDB;

GRANT SELECT, INSERT ON secure_audit TO secure_service;
