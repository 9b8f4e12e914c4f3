"""Secrets are not shown, wherever they stand."""

import time

import pytest

from kombu_fdb.primitives.masking import MASK, masked, masked_text

SECRET = "hunter2"


NAMES = (
    *("password", "DB_PASSWORD", "x-auth-token", "Authorization", "api_key", "apiKey", "X-API-Key", "client_secret"),
    *("aws_access_key_id", "private-key", "Set-Cookie", "credentials", "passphrase", "passwd", "pwd", "session_id"),
    *("cook\u0131e", "credent\u0130al", "\u017fecret", "to\u212aen"),  # in any case, as ``re.IGNORECASE`` has it
)


@pytest.mark.parametrize(
    "shape",
    [
        lambda name: {name: SECRET},
        lambda name: {"context": {name: SECRET}},
        lambda name: {"context": [{"deep": {name: [SECRET]}}]},
        lambda name: {"kwargsrepr": repr({"order": 1, name: SECRET, "last": (2,)})},
        lambda name: {"error": f"LoginError(user='a', {name}={SECRET!r})"},
        lambda name: {"error": f"refused: {name}: {SECRET}, try again"},
        lambda name: {"traceback": f'headers={{"{name}": "Bearer {SECRET}"}}'},
        lambda name: {"body": f'{{\\"{name}\\": \\"{SECRET}\\"}}'},
    ],
    ids=["name", "dict", "list", "repr", "error", "sentence", "header", "json"],
)
def test_a_named_secret_is_masked(shape):
    for name in NAMES:
        shown = repr({each: masked(each, value) for each, value in shape(name).items()})
        assert SECRET not in shown
        assert MASK in shown, name


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@host/0", "amqp://user:hunter2@host:5672//", "fdb://shop:hunter2@h:1"]
)
def test_a_secret_in_a_url_is_masked(url):
    assert SECRET not in masked_text(f"can't connect to {url}, is it there?")
    assert SECRET not in str(masked("options", {"urls": [url]}))


@pytest.mark.parametrize(
    "text",
    [
        "{'tokens': ['hunter2', 'hunter2']}",
        "{'credentials': {'user': 'hunter2', 'x': {'y': ['hunter2']}}, 'n': 1}",
        "{'api_key': {'v': 1, 'value': 'hunter2'}}",
        "{'password': \"it's 'hunter2' ok\"}",
        "{'password': b'hunter2'}",
        "{'credentials': shop.Credentials(user='bob', value='hunter2'), 'n': 1}",
        "{'credentials': <Credentials bob <x> hunter2>, 'n': 1}",
        "{'passwords': deque(['a', 'hunter2'])}",
        "{'headers': 'Authorization: Token hunter2'}",
        "Authorization: AWS4-HMAC-SHA256 Credential=hunter2, Signature=hunter2\nnext line",
        "Cookie: theme=dark; sessionid=hunter2",
        'Cookie: theme="dark"; jwt=hunter2',
        '{\'headers\': \'Authorization: Digest username="a", realm="b", response="hunter2"\'}',
        '"Authorization: Digest username=\\"a\\", response=\\"hunter2\\""',
        "can't connect to amqp://user:hunter2",
        "can't connect to https://user:hunter2",
        "('redis://:hunter2...', 7)",
        "redis://:p@hunter2@db/0",
        "postgres://svc:pa/hunter2@db/name",
        "https://hunter2@github.com/a/b",
        "https://hunter2:x-oauth-basic@github.com/a/b",
        '{"password": "ab\\"hunter2"}',
        "password=ab,hunter2 next",
        "private_key: -----BEGIN RSA PRIVATE KEY-----\nhunter2\nhunter2\n-----END RSA PRIVATE KEY-----",
        f"private_key='{'x' * 3000} hunter2'",
        "pwd=hunter2",
        "PW: hunter2",
        "DB_PASS=hunter2",
        "sessionid='hunter2'",
        "token = ['hunter2', 'cut off here",
        "token = 'hunter2 cut off here",
    ],
)
def test_all_of_a_value_is_masked(text):
    assert SECRET not in masked_text(text)
    assert MASK in masked_text(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{'token': ['a', {'b': 'c)'}], 'order': 7}", f"{{'token': {MASK}, 'order': 7}}"),
        ("login(password='x', user='a')", f"login(password={MASK}, user='a')"),
        ("login(password=Key('x', 'y'), user='a')", f"login(password={MASK}, user='a')"),
        ("login(password=<Key x y>, user='a')", f"login(password={MASK}, user='a')"),
        ("login(password=x, user=a)", f"login(password={MASK}, user=a)"),
        ("Authorization: Token x\nHost: y", f"Authorization: {MASK}\nHost: y"),
        ("'Authorization: a b=\"c\"', 'n': 1", f"'Authorization: {MASK}', 'n': 1"),
        ("amqp://user:x@host/v then", f"amqp://user:{MASK}@host/v then"),
    ],
)
def test_what_stands_beside_it_stays(text, shown):
    assert masked_text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "amqp://user@host/v",
        "author: Poe",
        "the keys of the queue: a, b",
        "at 12:30@home",
        "http://host:80/a@b",
        "http://host:80",
        "http://[::1]:80",
        "amqp://host:none is no port",
        "passed: 3",
    ],
)
def test_what_is_no_secret_stays(text):
    assert masked_text(text) == text


def test_other_values_stay_as_they_are():
    assert masked("h", {"a": 1, "b": [None, True, 2.5], "c": {}}) == {"a": 1, "b": [None, True, 2.5], "c": {}}


@pytest.mark.parametrize(
    "part",
    [
        "a",
        "password",
        "password=",
        'token:"',
        "secret ' ",
        "://",
        "://a:",
        "api_key\\",
        "token:[",
        'cookie:="',
        'cookie:a="b"',
        "token:{'",
        "a://b:c/",
        "password: -----BEGIN",
    ],
)
def test_a_hostile_text_costs_no_more_than_its_length(part):
    def cost(length):
        begin = time.process_time()
        masked_text(part * (length // len(part)))
        return time.process_time() - begin

    cost(1_000)
    assert cost(400_000) < 40 * max(cost(40_000), 0.005)


def test_deep_values_end():
    deep = SECRET
    for _ in range(5_000):
        deep = [deep]
    assert SECRET not in str(masked("h", {"password": deep}))
    assert "..." in str(masked("h", deep))
