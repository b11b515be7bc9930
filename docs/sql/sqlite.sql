-- The tables of adk-secure-sessions, for SQLite.
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

CREATE TABLE secure_apps (
  id INTEGER NOT NULL,
  tag BLOB NOT NULL,
  app_name BLOB NOT NULL,
  version BIGINT NOT NULL,
  state BLOB NOT NULL,
  PRIMARY KEY (id),
  UNIQUE (tag)
);

CREATE TABLE secure_users (
  id INTEGER NOT NULL,
  app_row BIGINT NOT NULL,
  tag BLOB NOT NULL,
  version BIGINT NOT NULL,
  state BLOB NOT NULL,
  PRIMARY KEY (id),
  UNIQUE (tag)
);

CREATE INDEX ix_secure_users_app_row ON secure_users (app_row, id);

CREATE TABLE secure_witnesses (
  tag BLOB NOT NULL,
  number BIGINT NOT NULL,
  seal BLOB NOT NULL,
  PRIMARY KEY (tag)
)
 WITHOUT ROWID;

CREATE TABLE secure_sessions (
  id INTEGER NOT NULL,
  user_row BIGINT NOT NULL,
  tag BLOB NOT NULL,
  revision BIGINT NOT NULL,
  base_revision BIGINT NOT NULL,
  created_at BIGINT NOT NULL,
  updated_at BIGINT NOT NULL,
  expires_at BIGINT NOT NULL,
  state BLOB NOT NULL,
  PRIMARY KEY (id),
  UNIQUE (tag)
);

CREATE INDEX ix_secure_sessions_user_row ON secure_sessions (user_row, id);

CREATE TABLE secure_bases (
  session_row INTEGER NOT NULL,
  revision BIGINT NOT NULL,
  state BLOB NOT NULL,
  PRIMARY KEY (session_row)
);

CREATE TABLE secure_events (
  session_row INTEGER NOT NULL,
  seq BIGINT NOT NULL,
  time BIGINT NOT NULL,
  event BLOB NOT NULL,
  PRIMARY KEY (session_row, seq)
)
 WITHOUT ROWID;
