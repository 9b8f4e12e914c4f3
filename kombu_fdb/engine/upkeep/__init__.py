"""What has to be done whether or not somebody asks: due, expired and abandoned messages, what was left behind."""
