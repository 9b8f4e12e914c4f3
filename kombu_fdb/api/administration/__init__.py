"""For a broker's operator: what it holds as a whole, how it is wired, and moving it to another store."""
