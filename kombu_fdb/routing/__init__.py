"""Exchanges, bindings and queue declarations, which all processes share through the store."""
