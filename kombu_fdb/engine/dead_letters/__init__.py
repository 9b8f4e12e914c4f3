"""Finding dead letters, and sending them back."""
