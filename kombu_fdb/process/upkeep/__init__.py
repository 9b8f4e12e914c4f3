"""What a session does in the background: its duties, in turn and within budgets."""
