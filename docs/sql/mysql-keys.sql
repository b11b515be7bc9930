-- The tables of a key database of adk-secure-sessions, for MySQL and MariaDB.
-- Run this script once, with the account that is to own the tables.
-- Pass create_tables=False to the service.
-- The script grants permissions to the role secure_service.  Create this role first, and grant it to
-- the account of the service.

CREATE TABLE secure_meta (
  name VARCHAR(64) NOT NULL,
  value VARCHAR(255) NOT NULL,
  PRIMARY KEY (name)
) ENGINE=InnoDB;

CREATE TABLE secure_keyring (
  id BIGINT NOT NULL,
  purpose VARCHAR(16) NOT NULL,
  root_key_id VARCHAR(255) NOT NULL,
  created_at BIGINT NOT NULL,
  wrapped LONGBLOB NOT NULL,
  PRIMARY KEY (id)
) ENGINE=InnoDB;

CREATE TABLE secure_data_keys (
  id BIGINT NOT NULL,
  owner VARBINARY(16) NOT NULL,
  generation BIGINT NOT NULL,
  backend_id BIGINT NOT NULL,
  created_at BIGINT NOT NULL,
  wrapped LONGBLOB NOT NULL,
  PRIMARY KEY (id),
  CONSTRAINT secure_data_keys_owner UNIQUE (owner, generation)
) ENGINE=InnoDB;

GRANT SELECT, INSERT, UPDATE, DELETE ON secure_meta TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_keyring TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_data_keys TO secure_service;
