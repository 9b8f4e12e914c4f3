"""What consumers of the same queues do together: wait in a line, and have its first one claim for all of them."""
