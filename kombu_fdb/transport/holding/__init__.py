"""What a channel holds, how much more it may hold, and how that is settled."""
