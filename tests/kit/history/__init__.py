"""Histories: what the processes of a run asked and were answered, and which guarantees that bears out.

``record.py`` writes them, ``events.py`` reads them, ``checks.py`` judges them, ``report.py`` says what came of it.
"""
