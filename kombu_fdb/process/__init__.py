"""One process at a store: its client, session, duties and times to run."""
