"""What the transport tells, and learns from, the Celery worker that it runs in. Nothing here imports Celery."""
