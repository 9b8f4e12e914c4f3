"""One process at a store: its client, session, duties, and the time its messages may run."""
