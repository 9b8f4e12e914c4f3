"""Any arguments, and any bytes in the store: each command ends with an exit code, and an error is one line."""

from contextlib import suppress

import click
import pytest
from click.testing import CliRunner
from store_messages import NAMES, clear, fill

from celery_fdb.cli import fdb, servers
from kombu_fdb import Broker, KombuFDBError
from kombu_fdb.process.client import Client
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import parse_options

pytestmark = pytest.mark.timeout(0)

TEXTS = [
    *("", " ", "q", "q.dead", "jobs", "k", "t", "-", "--", ".", "..", "none", "None", "true", "[]", "{}", "null", "%s"),
    *("0", "-1", "1", "3", "9" * 30, "9" * 400, "1e400", "inf", "-inf", "nan", "1_0", "\u0663", "1/0", "1/m", "0/s"),
    *("1e-17", "7d", "0s", "9" * 400 + "d", "\x1b[2J", "\u202e", "a\nb", "\u00fc" * 300, "x" * 3_000, "00" * 16, "zz"),
    *("0x1", "\udcff"),  # the latter a byte that is no UTF-8, as a shell hands it over
    *("fdb://", "fdb+sqlite://", "redis://h", "://", "fdb+sqlite:////nosuch/b.db", "/nosuch/file", "/dev"),
]
#: Options that are not drawn like the others: most brokers that one could name hold nothing that a command could meet.
APART = {"again", "broker", "broker_options"}
#: What shows messages, of a queue that may have some.
LOOKS = [("peek",), ("peek", "--body"), ("peek", "--body", "--json"), ("search", "--task", "*"), ("dead", "list")]
LOOKS += [("dead", "list", "--json"), ("dead", "causes"), ("find", "t"), ("keys",)]
#: They would wait for ever; ``--once`` and the like end them.
ENDLESS = {"top": ["--once"], "metrics": ["--once"]}


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("FDB_CLUSTER_FILE", str(tmp_path / "nosuch.cluster"))
    monkeypatch.setattr(servers, "_serve", lambda *_: None)  # it listens, and would answer for ever
    return f"fdb+sqlite:///{tmp_path}/broker.db"


@pytest.fixture
def broker(url):
    """As if in another process."""
    options = parse_options({"poll_interval": 3600.0})
    with Broker(Client(locate(parse_url(url), options), options)) as broker:
        yield broker


def put(broker, chance):
    """Jobs, besides the odd messages of tasks."""
    for _ in range(3):
        with suppress(KombuFDBError):
            broker.queue(chance.choice(["q", "jobs", ""])).put(chance.randbytes(5), key=chance.choice(["", "k"]))
    for job in broker.queue("q").take_many(2, 0):
        chance.choice([job.ack, job.bury, job.release])()


def leaves(group, path=()):
    """Every command, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from leaves(found, (*path, name))
        else:
            yield (*path, name), found


#: The tour has a broker and workers of its own.
COMMANDS = [(path, made) for path, made in leaves(fdb) if path != ("tour",)]


def arguments(chance, made):
    """Options and arguments that the command has, with values that it may not have meant."""
    given = []
    for each in made.params:
        values = [chance.choice(TEXTS) for _ in range(each.nargs if each.nargs > 0 else chance.randrange(3))]
        if isinstance(each, click.Argument):
            given += values if each.required or chance.randrange(2) else []
        elif each.name not in APART and not chance.randrange(3):
            given += [chance.choice(each.opts), *([] if getattr(each, "is_flag", False) else values)]
    if not chance.randrange(10):
        given.insert(chance.randrange(len(given) + 1), chance.choice(TEXTS))
    return given


def test_every_command_ends_in_an_exit_code_and_one_line(url, broker, fuzz, tmp_path):
    def target(chance):
        put(broker, chance)
        fill(broker, chance)
        for look in chance.sample(LOOKS, 4):
            line = ["--broker", url, *look, *([] if "find" in look else ["--", chance.choice(NAMES)])]
            check(line, CliRunner().invoke(fdb, line))
        for path, made in chance.sample(COMMANDS, 6):
            where = ["--broker", url] if chance.randrange(8) else ["--broker", chance.choice(TEXTS)]
            if not chance.randrange(8):
                where += ["--broker-options", chance.choice(['{"connect_timeout": 0.2}', *TEXTS])]
            given = [*ENDLESS.get(path[-1], []), *arguments(chance, made)]
            line = [*where, *path, *given] if chance.randrange(4) else [*path, *where, *given]
            check(line, CliRunner().invoke(fdb, line, input=chance.choice(["", "y\n", "n\n"])))
        assert broker.queues() is not None
        clear(broker)

    fuzz(target)


def check(line, result):
    assert result.exception is None or isinstance(result.exception, SystemExit), (line, result.exc_info)
    assert result.exit_code in {0, 1, 2, 3}, (line, result)
    assert "Traceback" not in result.output, (line, result.output)
    if result.exit_code == 3:
        assert [each for each in result.output.splitlines() if "rror" in each], (line, result.output)
