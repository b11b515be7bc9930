-- The tables of adk-secure-sessions, for MySQL and MariaDB.
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

CREATE TABLE secure_apps (
  id BIGINT NOT NULL,
  tag VARBINARY(16) NOT NULL,
  app_name BLOB NOT NULL,
  version BIGINT NOT NULL,
  state LONGBLOB NOT NULL,
  PRIMARY KEY (id),
  UNIQUE (tag)
) ENGINE=InnoDB;

CREATE TABLE secure_users (
  id BIGINT NOT NULL,
  app_row BIGINT NOT NULL,
  tag VARBINARY(16) NOT NULL,
  version BIGINT NOT NULL,
  state LONGBLOB NOT NULL,
  PRIMARY KEY (id),
  UNIQUE (tag)
) ENGINE=InnoDB;

CREATE INDEX ix_secure_users_app_row ON secure_users (app_row, id);

CREATE TABLE secure_witnesses (
  tag VARBINARY(16) NOT NULL,
  number BIGINT NOT NULL,
  seal LONGBLOB NOT NULL,
  PRIMARY KEY (tag)
) ENGINE=InnoDB;

CREATE TABLE secure_sessions (
  id BIGINT NOT NULL,
  user_row BIGINT NOT NULL,
  tag VARBINARY(16) NOT NULL,
  revision BIGINT NOT NULL,
  base_revision BIGINT NOT NULL,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  expires_at BIGINT NOT NULL,
  state LONGBLOB NOT NULL,
  PRIMARY KEY (id),
  UNIQUE (tag)
) ENGINE=InnoDB;

CREATE INDEX ix_secure_sessions_user_row ON secure_sessions (user_row, id);

CREATE TABLE secure_bases (
  session_row BIGINT NOT NULL,
  revision BIGINT NOT NULL,
  state LONGBLOB NOT NULL,
  PRIMARY KEY (session_row)
) ENGINE=InnoDB;

CREATE TABLE secure_events (
  session_row BIGINT NOT NULL,
  seq BIGINT NOT NULL,
  time BIGINT NOT NULL,
  event LONGBLOB NOT NULL,
  PRIMARY KEY (session_row, seq)
) ENGINE=InnoDB;

GRANT SELECT, INSERT, UPDATE, DELETE ON secure_meta TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_keyring TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_data_keys TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_apps TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_users TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_witnesses TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_sessions TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_bases TO secure_service;
GRANT SELECT, INSERT, UPDATE, DELETE ON secure_events TO secure_service;
