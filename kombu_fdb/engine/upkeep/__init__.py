"""What has to be done without being asked for: due, expired and abandoned messages, what was left behind."""
