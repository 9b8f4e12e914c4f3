"""Export and import: nothing is lost and nothing doubled, whatever is killed and whenever."""

import base64
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.conformance.invariants import check_counts, check_whereabouts
from kit.duties import promote_all
from kit.processes import until

from celery_fdb.operations import transfer as module
from celery_fdb.operations.transfer import (
    Header,
    broker_source,
    file_source,
    import_from,
    read_entries,
    read_header,
    verify,
    write,
)
from kombu_fdb import Broker
from kombu_fdb.engine.transfer import Transfer
from kombu_fdb.errors import FormatError, StoreUnavailable
from kombu_fdb.model import Death, KeyLimits, StoredMessage
from kombu_fdb.primitives.ranges import MOST
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.settings.location import ClusterLocation

ROOT = Path(__file__).parents[3]


@pytest.fixture
def source_url(tmp_path):
    """The embedded file that a project has outgrown."""
    return f"fdb+sqlite:///{tmp_path}/source.db"


@pytest.fixture
def source(another, source_url):
    return another(source_url)


@pytest.fixture
def filled(source):
    """Something of everything."""
    engine = source._engine
    engine.queues.declare_exchange(Exchange("orders", "topic", arguments={"a": 1}))
    jobs = source.declare("jobs", arguments={"x-max-length": 10_000}, durable=True)
    engine.queues.bind("jobs", "orders", "order.#")
    for number in range(30):
        jobs.put(f"{number}", key=["", "zoe", "adam"][number % 3], priority=number % 2 * 5, task_id=f"t{number}")
    jobs.put("large" * 50_000, key="zoe", ttl=5000, ttr=60)
    jobs.put("later", delay=7200, key="adam", priority=3, task_id="later")
    jobs.put("soon", delay=3600)
    jobs.limit("adam", weight=2, max_in_flight=4)
    jobs.control(newcomer="current")
    jobs.limit_every_key(rate=7.0)
    jobs.put("poison", priority=9, key="zoe", task_id="poison")
    jobs.take(0).bury(error="boom")
    jobs.put("tried", priority=9)
    jobs.take(0).release()
    jobs.put("once", dedup_id="d1", dedup_window=1000)
    source.close()  # ends its session
    return source


@pytest.fixture
def exported(run, filled, source_url, tmp_path):
    """Its file."""
    run("export", str(tmp_path / "f"), broker=source_url)
    return tmp_path / "f"


def contents(broker):
    """Everything that is to come over, in order."""
    source = broker_source(broker, leased=True)
    return [entry for _, entry in source[1]()]


def same(entries):
    """By kind: order counts among messages of one queue only."""
    messages = [each for each in entries if isinstance(each, StoredMessage)]
    others = sorted(repr(each) for each in entries if not isinstance(each, StoredMessage))
    return others, messages


# -- what comes over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["file", "direct"])
def test_everything_comes_over_as_it_was(run, another, broker, filled, source_url, tmp_path, way):
    before = same(contents(another(source_url)))
    assert len(before[1]) == 36
    if way == "file":
        file = str(tmp_path / "all.jsonl")
        assert run("export", file, "--json", broker=source_url).json["messages"] == 36
        result = run("import", file, "--json")
    else:
        result = run("import", "--from", source_url, "--json")
    assert (result.json["messages"], result.json["stored"]) == (36, 36)
    assert same(contents(broker)) == before
    assert same(contents(another(source_url))) == before, "the source stays as it is"
    check_counts(broker._engine)
    check_whereabouts(broker._engine)


def test_what_came_over_works(run, broker, filled, source_url):
    """Routing, limits, search by task, dead letters, due times, dedup and the order of delivery."""
    run("import", "--from", source_url)
    jobs, engine = broker.queue("jobs"), broker._engine
    assert engine.inspect.route("orders", "order.new") == ["jobs"]
    assert engine.inspect.queue("jobs") == QueueDeclaration("jobs", arguments={"x-max-length": 10_000})
    assert engine.inspect.limits("jobs", "adam") == KeyLimits(weight=2, max_in_flight=4)
    assert engine.inspect.control("jobs").every_key.rate == 7.0
    assert [each.state for each in broker.find("later")] == ["delayed"]
    assert broker.find("poison")[0].deaths[0].details == {"error": "boom"}
    assert (jobs.stats().ready, jobs.stats().delayed, jobs.dead_letters.count().total()) == (33, 2, 1)
    jobs.put("again", dedup_id="d1")
    assert jobs.stats().ready == 33, "its window came along"
    jobs.limit_every_key(rate=None)
    jobs.unlimit("adam")
    assert jobs.take(0).attempts == 2
    payloads = [each.payload for each in jobs.take_many(100, 0)]
    for key, start in (("zoe", 1), ("adam", 2)):
        numbers = [int(each) for each in payloads if each.isdigit() and int(each) % 3 == start]
        assert numbers == sorted(numbers, key=lambda n: (-(n % 2), n)), f"the order of {key}"
    assert b"large" * 50_000 in payloads
    assert jobs.dead_letters.replay(1) == 1


def test_the_keys_have_their_turns_in_the_same_order(run, broker, source, source_url):
    jobs = source.queue("jobs")
    for key in ("zoe", "adam", "mia"):
        jobs.put_many([f"{key}{number}" for number in range(3)], key=key)
    expected = [each.payload for each in jobs.peek(9)]
    run("import", "--from", source_url)
    assert [each.payload for each in broker.queue("jobs").peek(9)] == expected


def test_an_unreadable_record_comes_over_as_the_bytes_it_is(run, broker, source, source_url, tmp_path):
    jobs = source.queue("jobs")
    jobs.put("a", key="k")
    engine = source._engine
    begin = engine.keys.keyed("jobs")
    key = engine.transactions.read(lambda work: work.tr.get_range(begin, begin + b"\xff"))[0][0]
    engine.transactions.write(lambda work: work.tr.set(key, b"garbage"))
    run("export", str(tmp_path / "f"), broker=source_url)
    assert run("import", str(tmp_path / "f")).code == 0
    (message,) = [each for each in contents(broker) if isinstance(each, StoredMessage)]
    assert (message.unreadable, message.payload, message.keyed) == (True, b"garbage", True)


def test_what_dead_workers_hold_comes_over_as_ready_if_it_is_said(run, url, broker, source, source_url, tmp_path):
    jobs = source.queue("jobs")
    jobs.put_many(["a", "b", "c"])
    jobs.put("k", key="key")
    held = jobs.take_many(2, 0)
    file = str(tmp_path / "f")
    for command in (["export", file], ["import", "--from", source_url]):
        result = run(*command, broker=source_url if command[0] == "export" else url)
        assert result.code == 1
        assert "Stop the workers" in result.err
        assert not Path(file).exists()
    assert broker.queues() == {}
    assert run("import", "--from", source_url, "--leased", "--json").json["stored"] == 4
    assert broker.queue("jobs").stats().ready == 4
    assert {each.redeliveries for each in broker.queue("jobs").peek(4)} == {0, 1}
    assert {each.payload for each in broker.queue("jobs").peek(4)} == {b"a", b"b", b"c", b"k"}
    for job in held:
        job.ack()


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_json_lines_for_its_owner_only(run, filled, source_url, tmp_path):
    file = tmp_path / "all.jsonl"
    old = os.umask(0)
    try:
        run("export", str(file), broker=source_url)
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["celery-fdb-export"] == 2
    assert lines[-1]["end"]["messages"] == lines[0]["messages"] == 36
    payloads = [base64.b64decode(each["message"]["payload"]) for each in lines if "message" in each]
    assert b"large" * 50_000 in payloads
    assert not (tmp_path / "all.jsonl.part").exists()


def test_nothing_is_taken_from_a_broker_that_is_not_there(run, tmp_path):
    typo = f"fdb+sqlite:///{tmp_path}/sorce.db"
    for result in (run("import", "--from", typo), run("export", str(tmp_path / "all.jsonl"), broker=typo)):
        assert (result.code, result.out) == (1, "")
        assert f"there is no broker (path: {tmp_path}/sorce.db)" in result.err
    assert not (tmp_path / "sorce.db").exists()
    assert not (tmp_path / "all.jsonl").exists()


def test_an_existing_file_is_replaced_only_if_it_is_said(run, filled, source_url, tmp_path):
    file = tmp_path / "f"
    file.write_text("precious")
    assert run("export", str(file), broker=source_url).code == 1
    assert file.read_text() == "precious"
    assert run("export", str(file), "--force", broker=source_url).code == 0


@pytest.mark.parametrize("damage", ["cut", "cut at a line", "changed", "newer", "another file", "empty"])
def test_half_an_export_is_refused_whole(run, broker, exported, damage):
    text = exported.read_bytes()
    lines = text.splitlines(keepends=True)
    exported.write_bytes(
        {
            "cut": text[: len(text) // 2],
            "cut at a line": b"".join(lines[:-1]),
            "changed": text.replace(b'"priority":5', b'"priority":6', 1),
            "newer": text.replace(b'{"celery-fdb-export":2', b'{"celery-fdb-export":3', 1),
            "another file": b"something else\n",
            "empty": b"",
        }[damage]
    )
    result = run("import", str(exported))
    assert (result.code, broker.queues()) == (1, {})
    assert len(result.err.splitlines()) == 1


def test_a_killed_export_leaves_no_file_of_that_name(another, filled, source_url, tmp_path):
    source, seen = broker_source(another(source_url)), []

    def killed(_):
        seen.append(1)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.export_to(tmp_path / "f", source, killed)
    assert not (tmp_path / "f").exists()


# -- again and again ---------------------------------------------------------------------------------------------------


def test_a_second_import_is_refused_and_doubles_nothing(run, broker, exported, source_url):
    for command in (["import", str(exported)], ["import", "--from", source_url]):
        before = broker.queues()
        assert run(*command).code == 0
        once = broker.queues()
        assert once != before
        result = run(*command)
        assert (result.code, broker.queues()) == (1, once)
        assert "already imported" in result.err


def test_again_stores_it_a_second_time_with_ids_of_their_own(run, broker, source, source_url):
    source.queue("jobs").put("large" * 50_000)
    run("import", "--from", source_url)
    assert run("import", "--from", source_url, "--again").code == 0
    assert run("import", "--from", source_url, "--again").code == 0
    jobs = broker.queue("jobs")
    assert len({each.message_id for each in jobs.peek(3)}) == 3
    jobs.take(0).ack()
    assert {each.payload for each in jobs.peek(3)} == {b"large" * 50_000}


def test_into_itself_is_refused(run, filled, source_url):
    result = run("import", "--from", source_url, broker=source_url)
    assert result.code == 1
    assert "same store" in result.err


def test_into_itself_by_another_path_is_refused(run, filled, source_url, tmp_path):
    link = tmp_path / "link.db"
    link.symlink_to(source_url.removeprefix("fdb+sqlite:///"))
    result = run("import", "--from", f"fdb+sqlite:///{link}", broker=source_url)
    assert (result.code, "same store" in result.err) == (1, True)


def test_a_cluster_has_one_name_whatever_file_names_it(tmp_path, monkeypatch):
    """An import into itself by another file doubled all messages. The id is a secret."""
    contents = "shop:S3cret@10.0.0.1:4500,10.0.0.2:4500"
    files = [tmp_path / name for name in ("a.cluster", "b.cluster")]
    for file in files:
        file.write_text(f"# ours: me@home\n{contents}\n")
    monkeypatch.setenv("FDB_CLUSTER_FILE", str(files[0]))
    locations = [ClusterLocation("n", file) for file in (*files, None)] + [ClusterLocation("n", None, contents)]
    names = {module.name_of(Mock(location=each)) for each in locations}
    assert len(names) == 1
    assert "S3cret" not in str(names)
    files[1].write_text(contents.replace("shop", "another"))
    assert module.name_of(Mock(location=locations[1])) not in names


def test_an_import_goes_on_when_coordinators_have_moved(tmp_path):
    """The marks of what is imported are found by the id; a new id would import all messages once more."""
    file, ids = tmp_path / "fdb.cluster", []
    for port in (4500, 4501):
        file.write_text(f"shop:S3cret@10.0.0.1:{port}\n")
        source = Mock(location=ClusterLocation("n", file))
        source.queues.return_value = {}
        ids.append(broker_source(source, leased=True)[0].id)
    assert ids[0] == ids[1]


def marks(broker):
    keys = broker._engine.keys
    begin, end = keys.prefix + b"\x02imported\x00", keys.prefix + b"\x02imported\x01"
    return broker._engine.transactions.read(lambda work: work.tr.get_range(begin, end))


def test_the_marks_are_cleared_when_it_is_over(run, broker, filled, source_url):
    run("import", "--from", source_url)
    assert marks(broker) == []


@pytest.mark.parametrize("way", ["file", "direct"])
@pytest.mark.parametrize("committed", [True, False], ids=["behind the commit", "before the commit"])
def test_an_import_that_dies_at_any_batch_goes_on(
    *, run, another, broker, filled, source_url, tmp_path, monkeypatch, way, committed
):
    """The process dies in each batch, before or after its commit, while a consumer is at work already."""
    monkeypatch.setattr(module, "MOST_RESTORED", (7, 1_000_000))
    before = same(contents(another(source_url)))
    run("export", str(tmp_path / "f"), broker=source_url)

    def open_source():
        return file_source(tmp_path / "f") if way == "file" else broker_source(another(source_url))

    restore, calls, deaths = Transfer.restore, [], 0

    def dying(self, import_id, messages):
        calls.append(1)
        if len(calls) > deaths:
            if committed:
                restore(self, import_id, messages)
            raise StoreUnavailable("killed")
        return restore(self, import_id, messages)

    monkeypatch.setattr(Transfer, "restore", dying)
    for deaths in range(6):  # noqa: B007 - read by dying
        calls.clear()
        with pytest.raises(StoreUnavailable):
            import_from(open_source(), broker, lambda _: None)
    deaths = 1000
    import_from(open_source(), broker, lambda _: None)
    assert same(contents(broker)) == before


def test_what_was_consumed_meanwhile_does_not_come_again(run, another, broker, source, source_url, monkeypatch):
    monkeypatch.setattr(module, "MOST_RESTORED", (5, 1_000_000))
    source.queue("jobs").put_many([str(number) for number in range(12)])
    restore = Transfer.restore

    def dying(self, import_id, messages):
        restore(self, import_id, messages)
        raise StoreUnavailable("killed")

    monkeypatch.setattr(Transfer, "restore", dying)
    with pytest.raises(StoreUnavailable):
        import_from(broker_source(source), broker, lambda _: None)
    for job in broker.queue("jobs").take_many(3, 0):
        job.ack()
    monkeypatch.setattr(Transfer, "restore", restore)
    assert import_from(broker_source(source), broker, lambda _: None) == (12, 7)
    assert [each.payload for each in broker.queue("jobs").peek(20)] == [b"%d" % number for number in range(3, 12)]


def test_a_message_that_became_due_between_two_tries_is_not_doubled(another, broker, source, source_url, monkeypatch):
    source.queue("jobs").put("due", delay=0.05)
    transfer = broker._engine.transfer
    header = broker_source(source)[0]
    for mark, entry in broker_source(source)[1]():
        if isinstance(entry, StoredMessage):
            transfer.restore(header.id, [(mark, entry)])
    until(lambda: promote_all(source._engine)[0])
    assert import_from(broker_source(source), broker, lambda _: None)[1] == 0


def test_two_imports_at_once_share_the_work(another, url, broker, source, source_url, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_RESTORED", (5, 1_000_000))
    source.queue("jobs").put_many([str(number) for number in range(40)])
    module.export_to(tmp_path / "f", broker_source(source), lambda _: None)
    other = another()
    restore = Transfer.restore

    def beside(self, import_id, messages):
        other._engine.transfer.__class__.restore = restore
        restore(other._engine.transfer, import_id, messages)
        Transfer.restore = beside
        return restore(self, import_id, messages)

    monkeypatch.setattr(Transfer, "restore", beside)
    assert import_from(file_source(tmp_path / "f"), broker, lambda _: None)[1] == 0
    assert broker.queue("jobs").stats().ready == 40


# -- kill -9 -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("way", ["file", "direct"])
def test_kill_9_in_the_middle_of_an_import_and_the_same_command_goes_on(
    run, broker, url, source, source_url, tmp_path, way
):
    source.queue("jobs").put_many(["x" * 1500 + str(number) for number in range(4_000)], key="k")
    for number in range(1_000):
        source.queue(f"q{number % 3}").put(str(number), delay=3600)
    source.close()
    run("export", str(tmp_path / "f"), broker=source_url)
    where = [str(tmp_path / "f")] if way == "file" else ["--from", source_url]
    command = [sys.executable, "-m", "celery_fdb", "--broker", url, "import", *where]
    for share in (1, 1_500):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            until(lambda least=share: total(broker) >= least or process.poll() is not None)
            process.send_signal(signal.SIGKILL)
    killed = total(broker)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert 0 < killed < 5_000, "killed in the middle"
    assert f"({killed:,} were already there)" in result.stdout
    assert total(broker) == 5_000
    payloads = [each.payload for each in broker.queue("jobs").peek(5_000)]
    assert payloads == [b"x" * 1500 + b"%d" % number for number in range(4_000)]
    assert marks(broker) == []


def total(broker):
    return sum(each.ready + each.delayed for each in broker.queues().values())


def test_entries_are_numbered_by_their_lines(exported):
    numbers = [int.from_bytes(mark, "big") for mark, _ in read_entries(exported)]
    assert numbers == list(range(2, len(numbers) + 2))
    assert len(read_header(exported).id) == 16


def test_a_field_that_this_version_does_not_know_is_refused_in_any_entry(exported):
    entries = [json.loads(line) for line in exported.read_bytes().splitlines()[1:-1]]
    kinds = {kind for each in entries for kind in each}
    assert kinds == {"exchange", "queue", "binding", "control", "limits", "dedup", "message"}
    for ((kind, fields),) in map(dict.items, entries):
        module._decode(json.dumps({kind: fields}).encode(), 2)
        with pytest.raises(FormatError):
            module._decode(json.dumps({kind: {**fields, "new": 1}}).encode(), 2)


@pytest.mark.parametrize("number", [-(2**62), 2**62])
def test_a_damaged_counter_spoils_no_export(run, filled, another, broker, source_url, tmp_path, number):
    engine = another(source_url)._engine
    engine.transactions.write(lambda work: work.tr.add(work.keys.count("jobs", "ready"), number))
    run("export", str(tmp_path / "f"), broker=source_url)
    assert 0 <= read_header(tmp_path / "f").messages <= MOST
    assert import_from(file_source(tmp_path / "f"), broker, lambda _: None)[0] > 0


def test_another_namespace_of_the_same_cluster_or_file(run, broker, source, source_url):
    """Who told namespaces apart by an option names it for the source too."""
    options = ["--from", source_url, "--from-options", '{"namespace": "old"}']
    with Broker.open(source_url, namespace="old") as old:
        old.queue("jobs").put("a")
    assert run("import", *options, "--json").json["stored"] == 1
    assert run("import", "--from", source_url, "--json").json["messages"] == 0


texts = st.text(max_size=20)
deaths = st.builds(
    Death,
    queue=texts,
    reason=texts,
    count=st.integers(1, 9),
    time_ms=st.integers(0, 2**40),
    exchange=texts,
    routing_keys=st.lists(texts, max_size=2).map(tuple),
    details=st.dictionaries(texts, texts, max_size=2),
)
stored_messages = st.builds(
    StoredMessage,
    queue=texts,
    state=st.sampled_from(["ready", "delayed"]),
    payload=st.binary(max_size=50),
    priority=st.integers(0, 9),
    due_ms=st.integers(0, 2**40),
    key=texts,
    keyed=st.booleans(),
    message_id=st.binary(min_size=16, max_size=16),
    published_ms=st.integers(0, 2**40),
    expires_ms=st.integers(0, 2**40),
    redeliveries=st.integers(0, 2**16 - 1),
    ttr_ms=st.integers(0, 2**31),
    task_id=texts,
    deaths=st.lists(deaths, max_size=2).map(tuple),
    unreadable=st.booleans(),
)


@settings(deadline=None)
@given(st.lists(stored_messages, max_size=5))
def test_whatever_a_message_is_the_file_gives_it_back(tmp_path_factory, messages):
    file = tmp_path_factory.mktemp("export") / "f"
    write(file, Header(bytes(16), "here", 1, len(messages)), messages)
    assert verify(file) == len(messages)
    assert [entry for _, entry in read_entries(file)] == messages


def test_a_link_in_the_way_is_not_written_through(run, source, source_url, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "f.part").symlink_to(precious)
    assert run("export", str(tmp_path / "f"), broker=source_url).code == 0
    assert precious.read_text() == "precious"


def letters():
    """Messages with long histories, as a source has them."""
    death = Death("jobs", "rejected", 1, 0, details={"traceback": "x" * 60_000})
    for number in range(200):
        mark = number.to_bytes(16, "big")
        yield mark, StoredMessage("jobs.dead", "ready", b"a", 0, key="k", message_id=mark, deaths=(death,))


def test_long_histories_are_spread_over_transactions(run, broker):
    """A transaction of FoundationDB holds 10 MB; all of them together are 12 MB."""
    header = Header(b"letters".ljust(16), "elsewhere", 0, 200)
    assert import_from((header, letters), broker, lambda _: None)[1] == 200
    assert run("move", "jobs.dead", "graveyard", "--new", "--json").json["moved"] == 200
    check_counts(broker._engine)
