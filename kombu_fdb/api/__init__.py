"""The broker without Kombu: queues, jobs, dead letters."""
