"""Makes ``fdb://`` and ``fdb+sqlite://`` known to kombu, in every process, without an import in the user's code.

Kombu looks a URL's scheme up in a dict and offers no entry point to add to it. But it loads the entry points of the
group ``kombu.serializers`` at the end of ``kombu.serialization``, which every Celery app and every kombu ``Queue``,
``Producer`` or ``Consumer`` imports before it connects. This module is named there and adds the schemes on the way.

It runs while kombu is half imported, so it may import nothing but ``kombu.transport``; and since it runs in every
process that imports kombu, it must never fail. The alias is a string: the transport itself is imported on first use.
"""

from __future__ import annotations

__all__ = ["NOTHING", "SCHEMES", "TRANSPORT", "register"]

SCHEMES = ("fdb", "fdb+sqlite")
TRANSPORT = "kombu_fdb.transport:Transport"

#: What kombu asks for, a serializer: no encoder, no decoder, a content type nobody uses.
NOTHING = (None, None, "application/x-kombu-fdb-autoload")


def register() -> BaseException | None:
    """Add the schemes, unless somebody has claimed them. Never raises; returns what went wrong, for the doctor."""
    try:
        from kombu.transport import TRANSPORT_ALIASES

        for scheme in SCHEMES:
            TRANSPORT_ALIASES.setdefault(scheme, TRANSPORT)
    except Exception as error:  # noqa: BLE001 - it would break every ``import celery`` in this environment
        return error
    return None


FAILURE = register()
