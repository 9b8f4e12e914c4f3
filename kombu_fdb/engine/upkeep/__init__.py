"""Background work: due, expired and abandoned messages, and rows that were left behind."""
