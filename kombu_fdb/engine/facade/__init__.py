"""The engine's methods: each opens a transaction around a verb."""
