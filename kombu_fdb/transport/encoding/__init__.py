"""What a message says, and the bytes it is stored as."""
