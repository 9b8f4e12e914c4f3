"""Queues, exchanges and bindings: declared, checked, deleted."""
