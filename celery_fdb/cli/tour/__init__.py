"""``python -m celery_fdb tour``: a shop with two Celery workers, to see the broker at work.

``shop`` is an ordinary Celery application, ``processes`` its workers and dashboard, ``acts`` what happens to it,
``verdict`` whether all is well in the end, and ``command`` what the user calls.
"""
