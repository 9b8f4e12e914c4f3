"""Counters that add up: by queue, by key."""
