CREATE TABLE ledger (uuid TEXT NOT NULL, created_at TEXT NOT NULL) STRICT;
CREATE TABLE edge (
  from_state TEXT NOT NULL, to_state TEXT NOT NULL, sentence TEXT NOT NULL,
  PRIMARY KEY (from_state, to_state)
) STRICT, WITHOUT ROWID;
CREATE TABLE run (
  key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', request TEXT,
  generation INTEGER NOT NULL DEFAULT 0,
  created_at TEXT NOT NULL, changed_at TEXT NOT NULL, ended_at TEXT,
  number INTEGER NOT NULL DEFAULT 0, hash TEXT NOT NULL DEFAULT '', checkpoint BLOB,
  batches INTEGER NOT NULL DEFAULT 0, read INTEGER NOT NULL DEFAULT 0,
  rejected INTEGER NOT NULL DEFAULT 0, expected INTEGER, counts TEXT NOT NULL DEFAULT '{}',
  settings TEXT NOT NULL DEFAULT '{}', overrides TEXT NOT NULL DEFAULT '{}', job_version INTEGER,
  fresh_in_a_row INTEGER NOT NULL DEFAULT 0, read_s REAL NOT NULL DEFAULT 0,
  work_s REAL NOT NULL DEFAULT 0, own_s REAL NOT NULL DEFAULT 0, error TEXT,
  tried TEXT, tries INTEGER NOT NULL DEFAULT 0, size INTEGER,
  paused_s REAL NOT NULL DEFAULT 0, checks_at TEXT, deferred TEXT,
  retry_of TEXT REFERENCES run (id)
) STRICT;
CREATE UNIQUE INDEX one_unfinished_run_a_job ON run (job)
  WHERE state NOT IN ('succeeded', 'cancelled');
CREATE INDEX run_of_job ON run (job, key);
CREATE TABLE attempt (
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL,
  supervisor TEXT NOT NULL, worker TEXT, began_at TEXT NOT NULL, ended_at TEXT,
  ending TEXT, reason TEXT, exit_code INTEGER, signal INTEGER,
  error TEXT, unchanged TEXT, todo TEXT,
  peak_rss_bytes INTEGER, from_number INTEGER NOT NULL, to_number INTEGER,
  releases TEXT NOT NULL DEFAULT '[]', charged INTEGER NOT NULL DEFAULT 0, retry INTEGER,
  cleans_until REAL, admitted INTEGER REFERENCES event, PRIMARY KEY (run, generation)
) STRICT, WITHOUT ROWID;
CREATE TABLE batch (
  run INTEGER NOT NULL REFERENCES run, number INTEGER NOT NULL,
  generation INTEGER NOT NULL, kind TEXT NOT NULL, loop TEXT NOT NULL, cursor TEXT NOT NULL,
  first_key TEXT, last_key TEXT, read INTEGER NOT NULL, rejected INTEGER NOT NULL,
  counts TEXT NOT NULL, hash TEXT NOT NULL, at TEXT NOT NULL, elapsed_s REAL NOT NULL,
  rss_bytes INTEGER, open_files INTEGER, connections INTEGER, threads INTEGER, children INTEGER,
  PRIMARY KEY (run, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE reject (
  run INTEGER NOT NULL REFERENCES run, number INTEGER NOT NULL, generation INTEGER NOT NULL,
  place INTEGER NOT NULL, loop TEXT NOT NULL, record TEXT NOT NULL, reason TEXT NOT NULL,
  at TEXT NOT NULL, confirmed INTEGER NOT NULL DEFAULT 0,
  value TEXT, raw INTEGER NOT NULL DEFAULT 0, record_number INTEGER,
  tries INTEGER NOT NULL DEFAULT 1, state TEXT NOT NULL DEFAULT 'open',
  retry INTEGER REFERENCES run, why TEXT,
  PRIMARY KEY (run, number, generation, place)
) STRICT, WITHOUT ROWID;
CREATE TABLE event (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at TEXT NOT NULL, run INTEGER REFERENCES run, job TEXT,
  who TEXT NOT NULL, what TEXT NOT NULL, why TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX event_of_run ON event (run, id);
CREATE INDEX event_of_job ON event (job, id);
CREATE TRIGGER run_begins_as BEFORE INSERT ON run
  WHEN NOT EXISTS (SELECT 1 FROM edge WHERE from_state = 'new' AND to_state = NEW.state)
  BEGIN SELECT RAISE(ABORT, 'illegal transition: a run does not begin like this'); END;
CREATE TRIGGER run_goes_on_as BEFORE UPDATE OF state ON run
  WHEN NOT EXISTS (SELECT 1 FROM edge WHERE from_state = OLD.state AND to_state = NEW.state)
  BEGIN SELECT RAISE(ABORT, 'illegal transition: no edge between these states'); END;
CREATE TRIGGER events_stay BEFORE DELETE ON event
  WHEN OLD.id = (SELECT max(id) FROM event)
  BEGIN SELECT RAISE(ABORT, 'the newest event is the ledger''s clock'); END;

CREATE TABLE reading (
  id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL,
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL, number INTEGER NOT NULL,
  available_bytes INTEGER, limit_bytes INTEGER, limit_source TEXT, rss_bytes INTEGER,
  connections INTEGER, open_files INTEGER, threads INTEGER, children INTEGER, pressure REAL
) STRICT;
CREATE INDEX reading_of_run ON reading (run, id);
CREATE TABLE health_check (
  id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL,
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL,
  memory TEXT NOT NULL, connections TEXT NOT NULL, dependencies TEXT NOT NULL,
  verdict TEXT NOT NULL, why TEXT NOT NULL, elapsed_s REAL NOT NULL
) STRICT;
CREATE INDEX health_check_of_run ON health_check (run, id);
CREATE TABLE cleanup (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL,
  function TEXT NOT NULL, arguments TEXT NOT NULL, made_at TEXT NOT NULL,
  done_at TEXT, error TEXT, elapsed_s REAL
) STRICT;
CREATE INDEX cleanup_of_run ON cleanup (run, id);
CREATE INDEX pending_cleanup ON cleanup (run, id) WHERE done_at IS NULL;
CREATE TABLE barrier (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  device INTEGER NOT NULL, inode INTEGER NOT NULL,
  at TEXT NOT NULL, who TEXT NOT NULL, reason TEXT NOT NULL, until TEXT,
  scopes TEXT NOT NULL DEFAULT '[]', opened INTEGER NOT NULL REFERENCES event,
  overdue INTEGER REFERENCES event, closed INTEGER REFERENCES event, closed_at TEXT, closed_why TEXT
) STRICT;
CREATE UNIQUE INDEX one_barrier_at_a_time ON barrier (closed IS NULL) WHERE closed IS NULL;
CREATE TABLE drain (
  id INTEGER PRIMARY KEY AUTOINCREMENT, barrier INTEGER NOT NULL REFERENCES barrier,
  at TEXT NOT NULL, who TEXT NOT NULL, deadline_s REAL NOT NULL, ended_at TEXT,
  exit_code INTEGER, report TEXT
) STRICT;
CREATE TABLE approval (
  run INTEGER NOT NULL REFERENCES run, name TEXT NOT NULL, summary TEXT NOT NULL,
  asked_at TEXT NOT NULL, answered_at TEXT, who TEXT, why TEXT,
  PRIMARY KEY (run, name)
) STRICT, WITHOUT ROWID;
