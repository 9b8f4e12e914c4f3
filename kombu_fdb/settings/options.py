"""What the user sets in ``broker_transport_options``, parsed once into frozen :class:`Options` and typed from there on.

The URL says where the store is (``location.py``); everything else is here. A mistake is an
:exc:`~kombu_fdb.errors.OptionError`, with the next step in its ``fix``.

Other code uses the dict too. Kombu merges the retry policy of ``Producer.publish`` into it, and the brokers of a
failover list share one dict. So the names of kombu and of its other transports pass; only an unknown name is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any, Literal

from kombu_fdb.errors import OptionError
from kombu_fdb.primitives.ranges import Kind, is_number, refused, shown

logger = logging.getLogger(__name__)

LONGEST_NAMESPACE = 255
_MIB = 1024 * 1024
#: A sweeper declares a session dead after this many unchanged looks; they have to fit into one TTL.
_LOOKS = 4
_DEFAULT_SWEEP = 5.0
_SHORTEST_SWEEP = 0.05


# -- the kinds of values -------------------------------------------------------------------------------------------


#: The metadata of an option's field: its kind, how it is stored, and what the table says about it.
_Metadata = dict[str, Any]


def _metadata(about: str, unit: str, kind: Kind, stored: Callable[[Any], Any] = lambda value: value) -> _Metadata:
    return {"about": about, "unit": unit, "kind": kind, "stored": stored}


def _number(about: str, unit: str, *, least: float, most: float) -> _Metadata:
    what = f"a number of {unit} from {least:,.10g} to {most:,.10g}"
    return _metadata(about, unit, Kind.number(what, least, most), float)


def _seconds(about: str, *, least: float = 0.05, most: float = 3_600) -> _Metadata:
    return _number(about, "seconds", least=least, most=most)


def _whole(about: str, unit: str, *, least: int = 1, most: int, or_none: bool = False) -> _Metadata:
    kind = Kind.whole(f"a whole number of {unit} from {least:,} to {most:,}", least, most)
    return _metadata(about, unit, kind.or_none() if or_none else kind)


def _choice(about: str, *choices: str) -> _Metadata:
    return _metadata(about, "", Kind(" or ".join(map(repr, choices)), lambda value: value in choices))


def _text(about: str, *, longest: int = 4_096) -> _Metadata:
    def accepts(value: Any) -> bool:
        text = _plain(value)
        return isinstance(text, str) and 0 < len(text.encode()) <= longest

    kind = Kind(f"a non-empty string of at most {longest:,} bytes", accepts).or_none()
    return _metadata(about, "", kind, _plain)


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that can be set, valid by construction. Field names are the option names.

    Times are seconds unless the name ends in ``_ms``. What each one means stands beside it, and in the table of
    docs/options.md, which is made from here. Raises ``OptionError`` for a value of the wrong type or range, or a
    contradiction.
    """

    session_ttl: float = field(
        default=30.0,
        metadata=_seconds(
            "how long a silent worker process keeps its messages before others get them; it does not limit tasks",
            least=0.5,
            most=86_400,
        ),
    )
    sweep_interval: float = field(
        default=_DEFAULT_SWEEP,
        metadata=_seconds(
            "how often a worker looks for dead sessions; at most a quarter of `session_ttl`, and a sixth of it if only "
            "`session_ttl` is set, to less than 30",
            least=_SHORTEST_SWEEP,
        ),
    )
    connect_timeout: float = field(
        default=5.0,
        metadata=_seconds("deadline for opening the store; when unset, Celery's `broker_connection_timeout` is used"),
    )
    publish_timeout: float = field(
        default=10.0,
        metadata=_seconds("deadline of one publish, including its retries"),
    )
    operation_timeout: float = field(
        default=5.0,
        metadata=_seconds("deadline of every other call: claim, ack, declare, ..."),
    )
    synchronous: Literal["normal", "full"] = field(
        default="normal",
        metadata=_choice(
            "SQLite only. `normal`: a publish survives the death of any process; a power cut can lose the last ones. "
            "`full`: survives a power cut too, and is slower",
            "normal",
            "full",
        ),
    )
    cluster_file: str | None = field(
        default=None,
        metadata=_text("FoundationDB only: path of the cluster file; when unset, the client library's default"),
    )
    tls_certificate_file: str | None = field(
        default=None,
        metadata=_text(
            "FoundationDB only, for coordinators with `:tls`: this client's certificate (PEM); when unset, "
            "`FDB_TLS_CERTIFICATE_FILE`. A process has one set of TLS options"
        ),
    )
    tls_key_file: str | None = field(
        default=None, metadata=_text("FoundationDB only: its private key (PEM); when unset, `FDB_TLS_KEY_FILE`")
    )
    tls_ca_file: str | None = field(
        default=None,
        metadata=_text("FoundationDB only: the authorities to trust (PEM); when unset, `FDB_TLS_CA_FILE`"),
    )
    tls_verify_peers: str | None = field(
        default=None,
        metadata=_text(
            "FoundationDB only: what a server's certificate must contain, as `Check.Valid=1,S.CN=fdb`; when unset, "
            "`FDB_TLS_VERIFY_PEERS`"
        ),
    )
    namespace: str | None = field(
        default=None,
        metadata=_text(
            "keeps several brokers apart in one store; when unset, the URL's path on a cluster, else `default`",
            longest=LONGEST_NAMESPACE,
        ),
    )
    fair_key: str | None = field(
        default=None,
        metadata=_text(
            "where a message's fairness key comes from if it names none: a header, such as `tenant`, or a function, "
            "such as `myapp.keys:by_tenant`",
            longest=255,
        ),
    )
    priority_order: Literal["amqp", "redis"] = field(
        default="amqp",
        metadata=_choice("`amqp`: 9 is the most urgent; `redis`: 0 is, as in kombu's Redis transport", "amqp", "redis"),
    )
    delivery_limit: int | None = field(
        default=20,
        metadata=_whole(
            "how often a message is redelivered before it is dead-lettered, unless its queue sets `x-delivery-limit`"
            "; None for no limit",
            "redeliveries",
            most=65_535,
            or_none=True,
        ),
    )
    max_message_size: int = field(
        default=8 * _MIB,
        metadata=_whole(
            "a larger message is refused with an error and not stored; a transaction of the store holds 10,000,000",
            "bytes",
            least=1_024,
            most=9_000_000,
        ),
    )
    dedup_window: float = field(
        default=300.0,
        metadata=_seconds(
            "how long a second message with the same `dedup_id` to the same destination is not stored, unless its "
            "header `dedup_window` says otherwise",
            least=0.001,
            most=31 * 86_400,
        ),
    )
    claim_window: int = field(
        default=64,
        metadata=_whole(
            "how many messages one transaction claims at most; the worker's prefetch limit still applies",
            "messages",
            most=1_000,
        ),
    )
    ack_delay_ms: float = field(
        default=2.0,
        metadata=_number(
            "how long an ack may wait to share a transaction with others; where messages follow each other without a "
            "pause, up to eight times as long",
            "milliseconds",
            least=0,
            most=1_000,
        ),
    )
    undrained_timeout: float = field(
        default=5.0,
        metadata=_seconds(
            "how long a claimed message may wait until its program drains the connection; then it is released to its "
            "place, uncounted",
            least=0.05,
        ),
    )
    poll_interval: float = field(
        default=5.0,
        metadata=_seconds("safety net: an idle consumer looks this often even if it was told of no change", least=0.01),
    )

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _schema()}
        for name, value, kind in refused(_schema(), given):
            raise OptionError("unusable option value", name=name, value=shown(value), fix=f"{name} takes {kind.what}.")
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, each.metadata["stored"](given[each.name]))
        if self.sweep_interval * _LOOKS > self.session_ttl:
            raise OptionError(
                "contradictory options",
                sweep_interval=self.sweep_interval,
                session_ttl=self.session_ttl,
                fix=f"A session is dead after {_LOOKS} unchanged looks, which must fit into its TTL: set "
                f"sweep_interval to at most {self.session_ttl / _LOOKS:g}, or raise session_ttl.",
            )


@cache
def _schema() -> dict[str, Kind]:
    return {each.name: each.metadata["kind"] for each in dataclasses.fields(Options)}


# -- the dict ------------------------------------------------------------------------------------------------------

#: Kombu and Celery write these into the same dict, or read them from it themselves.
_KOMBU = frozenset(
    """
    body_encoding callback confirm_publish confirm_timeout connect_retries_timeout connection_errors
    deadletter_queue errback failover_strategy interval_max interval_start interval_step max_retries
    polling_interval retry_errors timeout
    """.split()  # noqa: SIM905 - fifty lines otherwise
)

#: Options of kombu's other transports: they may be left over, or meant for another broker of a failover list.
_FOREIGN = frozenset(
    """
    ack_emulation ack_modify_batch_size authentication calc_queue_size channel_max client_config client_name
    client_properties conn_string consumer_arguments control_folder credential_provider data_folder_in
    data_folder_out fanout_patterns fanout_prefix fifo_mode frame_handler frame_max frame_writer
    global_keyprefix health_check_interval heartbeat is_secure kafka_admin_config kafka_common_config
    kafka_consumer_config kafka_producer_config locale login_method login_response master_name max_connections
    max_poll_seconds min_other_sentinels num_partitions on_blocked on_open on_tune_ok on_unblocked
    peek_lock_seconds pool_timeout predefined_exchanges predefined_queues priority_steps processed_folder
    queue_name_prefix queue_order_strategy queue_tags read_timeout readpreference region replication_factor
    retry_on_timeout retry_total sasl_mechanism secure security_protocol sentinel_fanout_compat
    sentinel_kwargs sep socket_connect_timeout socket_keepalive socket_keepalive_options socket_settings
    socket_timeout ssl ssl_certfile ssl_keyfile ssl_skip_hostname_check ssl_trustfile store_processed
    supports_fanout topic_config unacked_index_key unacked_key unacked_mutex_expire unacked_mutex_key
    unacked_restore_interval unacked_restore_limit unacked_restore_throttle use_notify visibility_timeout
    wait_time_seconds write_timeout
    """.split()  # noqa: SIM905 - fifty lines otherwise
)

_WHY_IGNORED = {
    "visibility_timeout": (
        "it is not needed: a worker keeps its messages for as long as it lives, however long the task, and they are "
        "ready again within session_ttl plus one sweep after it dies"
    ),
    "priority_steps": (
        "each priority is a step; 9 is the most urgent, and on Redis 0 is, as here with priority_order='redis'"
    ),
}


def parse_options(given: Mapping[str, Any] | None = None, **fallbacks: Any) -> Options:
    """``broker_transport_options`` as :class:`Options`.

    ``fallbacks``: values for options that ``given`` does not set, for instance kombu's own ``connect_timeout``; None
    counts as not set. Raises ``OptionError``.
    """
    known = set(_schema())
    values = {name: value for name, value in fallbacks.items() if value is not None}
    for name, value in (given or {}).items():
        if name in known:
            values[name] = value
        elif (why := why_ignored(name)) is not None:
            _tell_once(name, why)
        elif name not in _KOMBU:
            near = difflib.get_close_matches(str(name), sorted(known | _FOREIGN), n=1)
            advice = f"Did you mean {near[0]}?" if near else f"Known options: {', '.join(sorted(known))}."
            raise OptionError("unknown option", name=name, suggestion=near[0] if near else None, fix=advice)
    if "sweep_interval" not in values and is_number(values.get("session_ttl"), -inf, inf):
        # A user who shortens the TTL alone means to shorten both.
        values["sweep_interval"] = min(_DEFAULT_SWEEP, max(values["session_ttl"] / (_LOOKS + 2), _SHORTEST_SWEEP))
    return Options(**values)


def why_ignored(name: str) -> str | None:
    """Why an option of another transport has no effect; None for any other name."""
    if name in _FOREIGN:
        return _WHY_IGNORED.get(name, "it is an option of another transport")
    return None


@cache  # the only state here: what was logged already, so that a pool of connections logs it once
def _tell_once(name: str, why: str) -> None:
    logger.info("celery-fdb ignores the transport option %s: %s", name, why)


# -- for the documentation -----------------------------------------------------------------------------------------


def options_table() -> str:
    """The table of docs/options.md, in Markdown."""
    rows = ["| option | default | unit | what it does |", "|---|---|---|---|"]
    for each in dataclasses.fields(Options):
        default = f"{each.default:,}" if type(each.default) is int else repr(each.default)
        rows.append(f"| `{each.name}` | `{default}` | {each.metadata['unit']} | {each.metadata['about']} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(options_table(), end="")  # noqa: T201 - for docs/options.md
