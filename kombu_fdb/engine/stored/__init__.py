"""What a message is in the store, and what every verb needs around it: sessions, counters, the index by task."""
