"""Counters that add up, by queue and by key, and samples for charts."""
