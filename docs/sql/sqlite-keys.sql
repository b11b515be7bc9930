-- The tables of a key database of adk-secure-sessions, for SQLite.
-- Run this script once.
-- Pass create_tables=False to the service.

CREATE TABLE secure_meta (
  name VARCHAR(64) NOT NULL,
  value VARCHAR(255) NOT NULL,
  PRIMARY KEY (name)
);

CREATE TABLE secure_keyring (
  id INTEGER NOT NULL,
  purpose VARCHAR(16) NOT NULL,
  root_key_id VARCHAR(255) NOT NULL,
  created_at BIGINT NOT NULL,
  wrapped BLOB NOT NULL,
  PRIMARY KEY (id)
);

CREATE TABLE secure_data_keys (
  id INTEGER NOT NULL,
  owner BLOB NOT NULL,
  generation BIGINT NOT NULL,
  backend_id BIGINT NOT NULL,
  created_at BIGINT NOT NULL,
  wrapped BLOB NOT NULL,
  PRIMARY KEY (id),
  CONSTRAINT secure_data_keys_owner UNIQUE (owner, generation)
);
