"""``python -m celery_fdb tour``: a shop with two Celery workers, to see the broker at work.

``shop`` is an ordinary Celery application, and ``command`` what the user calls.
"""
