"""The queue engine: what happens to a message, in transactions, over any store (``store/protocol.py``)."""
