"""Exchanges, bindings and queue declarations: shared by all processes, kept in the store."""
