"""One Celery application in two hundred situations, the same on Redis, RabbitMQ and our stores.

``situations`` is the table, ``application`` what a worker runs, ``stage`` plays all of it at one broker, and
``brokers`` starts those. What each made of it stands in ``tests/parity/celery_recorded.json``.
"""
