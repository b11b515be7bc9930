-- Divides the tables of events and snapshots of an existing database, for PostgreSQL.
-- Stop all services and run this script with the account that owns the tables:
-- psql -v ON_ERROR_STOP=1 -f postgresql-partitioning.sql

BEGIN;

ALTER TABLE secure_bases RENAME TO whole_secure_bases;

ALTER TABLE secure_events RENAME TO whole_secure_events;

CREATE TABLE secure_bases (
  session_row BIGINT NOT NULL,
  revision BIGINT NOT NULL,
  state BYTEA NOT NULL,
  PRIMARY KEY (session_row)
) PARTITION BY HASH (session_row);

ALTER TABLE secure_bases ALTER COLUMN state SET STORAGE EXTERNAL;

CREATE TABLE secure_events (
  session_row BIGINT NOT NULL,
  seq BIGINT NOT NULL,
  time BIGINT NOT NULL,
  event BYTEA NOT NULL,
  PRIMARY KEY (session_row, seq)
) PARTITION BY HASH (session_row);

ALTER TABLE secure_events ALTER COLUMN event SET STORAGE EXTERNAL;

CREATE TABLE secure_bases_00 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 0);

CREATE TABLE secure_bases_01 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 1);

CREATE TABLE secure_bases_02 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 2);

CREATE TABLE secure_bases_03 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 3);

CREATE TABLE secure_bases_04 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 4);

CREATE TABLE secure_bases_05 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 5);

CREATE TABLE secure_bases_06 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 6);

CREATE TABLE secure_bases_07 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 7);

CREATE TABLE secure_bases_08 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 8);

CREATE TABLE secure_bases_09 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 9);

CREATE TABLE secure_bases_10 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 10);

CREATE TABLE secure_bases_11 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 11);

CREATE TABLE secure_bases_12 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 12);

CREATE TABLE secure_bases_13 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 13);

CREATE TABLE secure_bases_14 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 14);

CREATE TABLE secure_bases_15 PARTITION OF secure_bases
  FOR VALUES WITH (MODULUS 16, REMAINDER 15);

CREATE TABLE secure_events_00 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 0);

CREATE TABLE secure_events_01 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 1);

CREATE TABLE secure_events_02 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 2);

CREATE TABLE secure_events_03 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 3);

CREATE TABLE secure_events_04 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 4);

CREATE TABLE secure_events_05 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 5);

CREATE TABLE secure_events_06 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 6);

CREATE TABLE secure_events_07 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 7);

CREATE TABLE secure_events_08 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 8);

CREATE TABLE secure_events_09 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 9);

CREATE TABLE secure_events_10 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 10);

CREATE TABLE secure_events_11 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 11);

CREATE TABLE secure_events_12 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 12);

CREATE TABLE secure_events_13 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 13);

CREATE TABLE secure_events_14 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 14);

CREATE TABLE secure_events_15 PARTITION OF secure_events
  FOR VALUES WITH (MODULUS 16, REMAINDER 15);

INSERT INTO secure_bases SELECT * FROM whole_secure_bases;

INSERT INTO secure_events SELECT * FROM whole_secure_events;

DROP TABLE whole_secure_bases;

DROP TABLE whole_secure_events;

GRANT SELECT, INSERT, UPDATE, DELETE ON secure_bases TO secure_service;

GRANT SELECT, INSERT, UPDATE, DELETE ON secure_events TO secure_service;

COMMIT;

VACUUM ANALYZE secure_bases;

VACUUM ANALYZE secure_events;
