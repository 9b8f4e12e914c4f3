"""What a message is in the store, and what verbs need around it: their work, sessions, batches, copies of payloads."""
