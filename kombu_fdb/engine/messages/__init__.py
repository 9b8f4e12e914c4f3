"""The verbs of a message's life: publish, claim, settle, move, bury."""
