from pathlib import Path

import pytest
from kombu.utils.url import parse_url as kombu_parse_url

from kombu_fdb.errors import OptionError
from kombu_fdb.settings.location import (
    SCHEMES,
    ClusterLocation,
    SqliteLocation,
    UrlParts,
    default_cluster_file,
    default_sqlite_path,
    is_connection_string,
    locate,
    masked_url,
    parse_url,
)
from kombu_fdb.settings.options import Options, parse_options

NO_ENVIRONMENT = {"HOME": "/home/u"}


def where(url, environ=NO_ENVIRONMENT, **given):
    return locate(parse_url(url), parse_options(given), environ)


@pytest.mark.parametrize(
    "url",
    [
        "fdb://",
        "fdb:///",
        "fdb:///shop",
        "fdb:////etc/foundationdb/fdb.cluster",
        "fdb://desc:id@10.0.0.1:4500",
        "fdb://desc:id@10.0.0.1:4500/",
        "fdb://desc:id@10.0.0.1:4500/shop",
        "fdb://desc:id@10.0.0.1:4500/shop%20floor",
        "fdb://desc:i%64@DB.example.org:4500/",
        "fdb://desc:id@[::1]:4500/",
        "fdb+sqlite://",
        "fdb+sqlite:///",
        "fdb+sqlite:////var/lib/app/broker.db",
        "fdb+sqlite:///relative/broker.db",
        "fdb+sqlite:///~/broker.db",
        "fdb+sqlite:////tmp/with%20space.db",
        "fdb+sqlite:////tmp/with#fragment.db",
        "fdb+sqlite://host/broker.db",
    ],
)
def test_urls_are_taken_apart_as_kombu_does(url):
    theirs = kombu_parse_url(url)
    assert UrlParts(scheme=theirs.pop("transport"), **theirs) == parse_url(url)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("fdb+sqlite:////var/lib/app/broker.db", "/var/lib/app/broker.db"),
        ("fdb+sqlite:///relative.db", f"{Path.cwd()}/relative.db"),
        ("fdb+sqlite:////tmp/with%20space.db", "/tmp/with space.db"),
        ("fdb+sqlite:///~/broker.db", f"{Path.home()}/broker.db"),
        ("fdb+sqlite://localhost", "/home/u/.local/share/celery-fdb/broker.db"),
    ],
)
def test_file(url, path):
    location = where(url)
    assert isinstance(location, SqliteLocation)
    assert str(location.path) == path
    assert location.namespace == "default"


def test_a_file_with_a_namespace():
    assert where("fdb+sqlite:////x.db", namespace="blue") == SqliteLocation(Path("/x.db"), "blue")


@pytest.mark.parametrize("url", ["fdb+sqlite://", "fdb+sqlite:///"])
def test_the_default_file_belongs_to_the_user(url, tmp_path):
    location = where(url, {"XDG_DATA_HOME": str(tmp_path / "data")})
    assert location == SqliteLocation(tmp_path / "data/celery-fdb/broker.db", is_default=True)
    assert not (tmp_path / "data").exists()
    location.create_directory()
    location.create_directory()
    assert (tmp_path / "data/celery-fdb").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_the_user_named_is_not_created(tmp_path):
    where(f"fdb+sqlite:///{tmp_path}/typo/broker.db").create_directory()
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("platform", "environ", "path"),
    [
        ("linux", {"HOME": "/home/u"}, "/home/u/.local/share/celery-fdb/broker.db"),
        ("linux", {"HOME": "/home/u", "XDG_DATA_HOME": "/data"}, "/data/celery-fdb/broker.db"),
        ("linux", {"HOME": "/home/u", "XDG_DATA_HOME": "data"}, "/home/u/.local/share/celery-fdb/broker.db"),
        ("darwin", {"HOME": "/Users/u"}, "/Users/u/Library/Application Support/celery-fdb/broker.db"),
    ],
)
def test_default_path(platform, environ, path):
    assert str(default_sqlite_path(environ, platform)) == path


@pytest.mark.parametrize(
    ("url", "given", "expected"),
    [
        ("fdb://", {}, ClusterLocation()),
        ("fdb:///", {}, ClusterLocation()),
        ("fdb://localhost", {}, ClusterLocation()),
        ("fdb://localhost//", {}, ClusterLocation()),
        ("fdb:///shop", {}, ClusterLocation("shop")),
        ("fdb://", {"namespace": "shop"}, ClusterLocation("shop")),
        ("fdb:///shop", {"namespace": "shop"}, ClusterLocation("shop")),
        ("fdb:////etc/a.cluster", {}, ClusterLocation(cluster_file=Path("/etc/a.cluster"))),
        ("fdb:////etc/a.cluster", {"namespace": "shop"}, ClusterLocation("shop", Path("/etc/a.cluster"))),
        ("fdb:///shop", {"cluster_file": "/etc/a.cluster"}, ClusterLocation("shop", Path("/etc/a.cluster"))),
        ("fdb://d:i@10.0.0.1:4500", {}, ClusterLocation(connection_string="d:i@10.0.0.1:4500")),
        ("fdb://d:i@10.0.0.1:4500/shop", {}, ClusterLocation("shop", None, "d:i@10.0.0.1:4500")),
        ("fdb://d:i@[::1]:4500/shop", {}, ClusterLocation("shop", None, "d:i@[::1]:4500")),
    ],
)
def test_cluster(url, given, expected):
    assert where(url, **given) == expected


@pytest.mark.parametrize(
    ("url", "given", "message"),
    [
        (Path("broker.db"), {}, r"not a broker URL .*url: broker.db.*fdb\+sqlite:////absolute/path"),
        ("broker.db", {}, r"not a broker URL .*fdb\+sqlite:////absolute/path"),
        ("redis://localhost", {}, "unknown URL scheme .*Known: fdb, fdb"),
        ("fdb+sqlite:////x.db?synchronous=full", {}, "options in the URL .*broker_transport_options"),
        ("fdb+sqlite://var/lib/x.db", {}, "a file URL with a host .*four slashes"),
        ("fdb+sqlite:///:memory:", {}, "not a file .*memory://"),
        ("fdb+sqlite:////var/lib/", {}, "a directory instead of a file .*/var/lib/broker.db"),
        ("fdb:///etc/foundationdb/fdb.cluster", {}, "ambiguous path .*fdb:////etc/foundationdb/fdb.cluster"),
        ("fdb:///app.cluster", {}, "ambiguous path"),
        ("fdb://db.example.org:4500/shop", {}, "not a FoundationDB connection string .*description:id@host:port"),
        ("fdb://d:i@db.example.org/shop", {}, "not a FoundationDB connection string"),
        ("fdb://d:i@10.0.0.1:4500,10.0.0.2:4500/shop", {}, "unusable address .*cluster_file"),
        ("fdb://d:i@10.0.0.1:4500:tls/shop", {}, "unusable address .*cluster_file"),
        ("fdb://d:i@10.0.0.1:4500", {"cluster_file": "/a"}, "two clusters named"),
        ("fdb:////a.cluster", {"cluster_file": "/b.cluster"}, "the URL and an option disagree"),
        ("fdb:///shop", {"namespace": "store"}, "Remove it from the URL or from the transport options"),
        (f"fdb:///{'x' * 256}", {}, "the namespace is too long"),
    ],
)
def test_what_is_wrong_with_a_url_is_said_with_the_next_step(url, given, message):
    with pytest.raises(OptionError, match=message) as caught:
        where(url, **given)
    assert caught.value.fix


def test_the_cluster_id_is_not_shown():
    location = where("fdb://d:s3cret@10.0.0.1:4500/shop")
    assert "s3cret" not in f"{location} {location!r}"
    assert str(location) == "fdb://d:**@10.0.0.1:4500/shop"


@pytest.mark.parametrize("url", ["fdb://d:s3cret@10.0.0.1:x/", "fdb://d-d:s3cret@10.0.0.1:4500/shop"])
def test_the_cluster_id_is_not_shown_in_errors(url):
    with pytest.raises(OptionError) as caught:
        where(url)
    assert "s3cret" not in str(caught.value)


def test_locations_say_where_they_are(monkeypatch):
    monkeypatch.setenv("FDB_CLUSTER_FILE", "/shop/fdb.cluster")
    assert str(SqliteLocation(Path("/x.db"))) == "fdb+sqlite:////x.db"
    assert str(ClusterLocation("shop")) == "fdb:///shop (/shop/fdb.cluster)"
    assert str(ClusterLocation("shop", Path("/a.cluster"))) == "fdb:///shop (/a.cluster)"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("docker:docker@172.17.0.2:4500", True),
        ("a:b@h:1,h:2,[::1]:3:tls", True),
        ("a:b@h:1,", False),
        ("a@h:1", False),
        ("a:b@h", False),
        ("a b:c@h:1", False),
        ("", False),
    ],
)
def test_connection_strings(text, answer):
    assert is_connection_string(text) is answer


def test_default_cluster_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_cluster_file({"FDB_CLUSTER_FILE": "/x.cluster"}) == Path("/x.cluster")
    assert default_cluster_file({}, "linux") == Path("/etc/foundationdb/fdb.cluster")
    assert default_cluster_file({}, "darwin") == Path("/usr/local/etc/foundationdb/fdb.cluster")
    (tmp_path / "fdb.cluster").touch()
    assert default_cluster_file({}, "linux") == tmp_path / "fdb.cluster"


def test_the_environment_is_read_when_none_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert locate(parse_url("fdb+sqlite://"), Options()).path == tmp_path / "celery-fdb/broker.db"


def test_the_schemes_are_those_that_kombu_is_told():
    import _kombu_fdb_autoload

    assert _kombu_fdb_autoload.SCHEMES == SCHEMES


@pytest.mark.parametrize(
    "url", ["fdb://[::1", "fdb://d:id@[::1:4500/x", "fdb+sqlite://]", "fdb://[zz]/x", "fdb://d:SECRET@[v1.x:4500"]
)
def test_a_malformed_address_is_an_option_error(url):
    with pytest.raises(OptionError) as caught:
        locate(parse_url(url), Options())
    assert "SECRET" not in str(caught.value)


SECRETS = [
    "fdb:///shop:SECRET@host:4500/x",
    "fdb:///shop:SECRET@host:4500",
    "fdb:////shop:SECRET@host:4500/x",
    "fdb:/shop:SECRET@host:4500/x",
    "fdb+sqlite:///shop:SECRET@host:4500/",
    "fdb+sqlite:////shop:SECRET@host:4500/x",
    "fdb+sqlite://shop:SECRET@host:4500/x",
    "fdb://shop:SECRET@host:4500,another:4500/x",
    "fdb://shop:SECRET@host/x",
    "shop:SECRET@host:4500",
]


@pytest.mark.parametrize("url", SECRETS)
def test_a_cluster_id_is_never_shown_however_many_slashes_stand_before_it(url):
    shown = []
    try:
        parts = parse_url(url)
        shown.append(repr(parts))
        location = locate(parts, Options())
        shown += [str(location), repr(location)]
    except OptionError as error:
        shown += [str(error), repr(error), repr(error.attributes)]
    assert not [text for text in shown if "SECRET" in text]


@pytest.mark.parametrize("secret", ["s3cret", "pa:s3cret", "pa/s3cret", "s3@cret", ":", "s3:/@cret"])
def test_a_secret_in_a_whole_url_is_masked_whatever_is_in_it(secret):
    assert masked_url(f"fdb://shop:{secret}@10.0.0.1:4500/jobs") == "fdb://shop:**@10.0.0.1:4500/jobs"


def test_only_secrets_are_masked():
    for text in ("fdb+sqlite:////var/a:b/c@d.db", "fdb://10.0.0.1:4500/jobs", "fdb:////etc/fdb.cluster"):
        assert masked_url(text) == text
