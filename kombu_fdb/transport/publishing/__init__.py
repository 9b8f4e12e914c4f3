"""More than one message at a time, and one a second time."""
