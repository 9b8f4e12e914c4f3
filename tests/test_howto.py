"""What the how-tos show and no test can run as it stands: manifests, units, a Compose file.

Each is checked for what would go wrong: a command or option that does not exist, a name that is not declared, a metric
that the exporter does not have. What the Compose file does to FoundationDB is played with three server processes.
"""

import configparser
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import click
import pytest
import yaml
from celery.bin.celery import celery
from kit.processes import run_python

from celery_fdb.cli import fdb
from celery_fdb.inspection.metrics import GAUGES
from kombu_fdb import Broker
from kombu_fdb.testing.fdbserver import Cluster

HOWTO = Path(__file__).parents[1] / "docs" / "how-to"
FENCE = re.compile(r"^```(\w+)\n# ([\w.-]+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
STATES = {"ready", "delayed", "leased", "dead"}


def files_of(page):
    """The files that a page shows, by their names."""
    return {name: text for _, name, text in FENCE.findall((HOWTO / page).read_text())}


def manifests():
    texts = [text for name, text in files_of("kubernetes.md").items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def of_kind(kind):
    return [each for each in manifests() if each["kind"] == kind]


def compose():
    return yaml.safe_load(files_of("docker-compose.md")["compose.yaml"])


# -- commands ----------------------------------------------------------------------------------------------------------


def check_command(words):
    """Raises if there is no such command, or an option that it does not have."""
    program, *rest = words
    name = Path(program).name
    if name == "celery":
        walk(celery, rest)
    elif name == "python" and rest[:2] == ["-m", "celery_fdb"]:
        walk(fdb, rest[2:])
    else:
        assert (name, *rest[:2]) == ("python", "-m", "kombu_fdb.doctor"), words


def walk(command, words):
    """Parse as click would, without calling anything."""
    context = click.Context(command)
    _, rest, _ = command.make_parser(context).parse_args(list(words))
    if isinstance(command, click.Group):
        name, *rest = rest or command.no_args_is_help
        found = command.get_command(context, name)
        assert found is not None, name
        walk(found, rest)


@pytest.mark.parametrize(
    "wrong",
    ["celery -A shop werker", "celery -A shop worker --loglvl INFO", "python -m celery_fdb metrics --prt 1", "sleep 1"],
)
def test_a_wrong_command_is_found(wrong):
    with pytest.raises((AssertionError, click.UsageError)):
        check_command(shlex.split(wrong))


# -- systemd -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", files_of("systemd.md"))
def test_a_unit_is_whole(unit):
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.optionxform = str
    parsed.read_string(files_of("systemd.md")[unit])
    assert parsed.sections() == ["Unit", "Service", "Install"]
    service = parsed["Service"]
    check_command(shlex.split(service["ExecStart"]))
    if "ExecStartPre" in service:
        check_command(shlex.split(service["ExecStartPre"]))
    name, _, url = service["Environment"].partition("=")
    assert url.startswith("fdb+sqlite:////var/lib/shop/"), name
    assert service["Restart"] == "always"


def test_the_page_starts_each_of_its_units():
    (enabled,) = re.findall(r"systemctl enable --now (.+)", (HOWTO / "systemd.md").read_text())
    assert {f"{name}.service" for name in enabled.split()} == set(files_of("systemd.md"))


# -- Kubernetes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "manifest",
    [each for each in manifests() if "keda" not in each["apiVersion"]],
    ids=lambda each: f"{each['kind']} {each['metadata']['name']}",
)
def test_kubernetes_understands_it(manifest):
    """By its own schemas, in which no field is unknown; KEDA's kinds are none of its own."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    newest = kubernetes_validate.latest_version()
    kubernetes_validate.validate(manifest, newest, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**manifest, "sepc": {}}, newest, strict=True)


@pytest.mark.parametrize("deployment", of_kind("Deployment"), ids=lambda each: each["metadata"]["name"])
def test_a_deployment_agrees_with_itself(deployment):
    template = deployment["spec"]["template"]
    pod = template["spec"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    volumes = {each["name"] for each in pod["volumes"]}
    secrets = {each["metadata"]["name"]: each["stringData"] for each in of_kind("Secret")}
    (secret,) = (each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each)
    (copy,) = pod["initContainers"]
    (container,) = pod["containers"]
    source, target = copy["command"][-2:]
    assert Path(source).name in secrets[secret]
    mounted = {each["mountPath"]: each["name"] for each in (*copy["volumeMounts"], *container["volumeMounts"])}
    assert set(mounted.values()) == volumes
    for each in container["volumeMounts"]:
        assert mounted[each["mountPath"]] == each["name"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["FDB_CLUSTER_FILE"] == target
    check_command(container["command"])


def test_the_service_and_its_policy_lead_to_the_exporter():
    (metrics,) = (each for each in of_kind("Deployment") if each["metadata"]["name"] == "shop-metrics")
    (service,), (policy,) = of_kind("Service"), of_kind("NetworkPolicy")
    labels = metrics["spec"]["template"]["metadata"]["labels"]
    (port,) = metrics["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert str(port["containerPort"]) in metrics["spec"]["template"]["spec"]["containers"][0]["command"]


def queries():
    scaled = [each["spec"]["triggers"][0]["metadata"]["query"] for each in of_kind("ScaledObject")]
    return [*scaled, *re.findall(r"`(max\(celery_fdb.+?\))`", (HOWTO / "kubernetes.md").read_text())]


@pytest.mark.parametrize("query", queries())
def test_keda_asks_for_metrics_that_the_exporter_has(query):
    assert set(re.findall(r"celery_fdb_\w+", query)) <= set(GAUGES)
    for states in re.findall(r'state=~"([^"]+)"', query):
        assert set(states.split("|")) <= STATES


def test_only_keda_scales_the_workers():
    (scaled,) = of_kind("ScaledObject")
    (workers,) = (each for each in of_kind("Deployment") if each["metadata"]["name"] == "shop-worker")
    assert scaled["spec"]["scaleTargetRef"]["name"] == workers["metadata"]["name"]
    assert "replicas" not in workers["spec"]


# -- Docker Compose ----------------------------------------------------------------------------------------------------


def test_the_compose_file_is_valid(tmp_path):
    pytest.importorskip("check_jsonschema")
    (tmp_path / "compose.yaml").write_text(files_of("docker-compose.md")["compose.yaml"])
    run_python("-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", tmp_path / "compose.yaml")


def test_the_servers_are_the_coordinators():
    services = compose()["services"]
    servers = [services[name] for name in ("fdb1", "fdb2", "fdb3")]
    addresses = [f"{each['networks']['shop']['ipv4_address']}:4500" for each in servers]
    contents = {each["environment"]["FDB_CLUSTER_FILE_CONTENTS"] for each in (*servers, services["configure"])}
    (contents,) = contents
    assert contents.partition("@")[2].split(",") == addresses
    assert len({each["hostname"] for each in servers}) == 3, "each is a zone of its own"
    for name in ("worker", "metrics"):
        assert services[name]["environment"]["FDB_CLUSTER_FILE_CONTENTS"] == contents


def test_the_commands_of_the_services_exist():
    services = compose()["services"]
    check_command(shlex.split(services["worker"]["command"]))
    check_command(shlex.split(services["metrics"]["command"]))


def test_the_binding_and_the_library_are_of_the_servers_series():
    dockerfile, text = files_of("docker-compose.md")["Dockerfile"], (HOWTO / "docker-compose.md").read_text()
    versions = set(re.findall(r"foundationdb/foundationdb:([\d.]+)", text))
    versions |= set(re.findall(r"ARG FDB_VERSION=([\d.]+)", dockerfile))
    assert len(versions) == 1
    (series,) = re.findall(r"foundationdb==([\d.]+)\.\*", dockerfile)
    assert versions.pop().startswith(f"{series}.")


class AsComposed(Cluster):
    """Three processes, configured only by the script of the page's service."""

    def _cli(self, commands):
        del commands
        (script,) = compose()["services"]["configure"]["command"]
        contents = Path(self.cluster_file).read_text().strip()
        script = script.replace("$$", "$").replace("/tmp/fdb.cluster", f"{self.directory}/composed")
        environ = {"PATH": os.environ["PATH"], "FDB_CLUSTER_FILE_CONTENTS": contents}
        done = subprocess.run(
            ["/bin/bash", "-c", script], env=environ, capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)


@pytest.mark.foundationdb
@pytest.mark.process
def test_the_composed_cluster_survives_the_loss_of_a_server():
    with AsComposed(processes=3) as cluster:
        patience = {"connect_timeout": 60, "publish_timeout": 60, "operation_timeout": 60}
        with Broker.open("fdb:///shop", cluster_file=cluster.cluster_file, **patience) as broker:
            broker.queue("celery").put("before")
            cluster.servers[1].stop()
            broker.queue("celery").put("after")
            taken = [broker.queue("celery").take(timeout=60).payload for _ in range(2)]
        assert taken == [b"before", b"after"]
        cluster._cli("again: to configure what is configured changes nothing")


# -- backup ------------------------------------------------------------------------------------------------------------

PUBLISHER = """
import sys
from kombu_fdb import Broker

with Broker.open(sys.argv[1]) as broker, open(sys.argv[2], "w") as confirmed:
    while True:
        broker.queue("jobs").put("later", delay=3600)
        print(".", end="", file=confirmed, flush=True)
        if confirmed.tell() == 200:
            print("200 confirmed", flush=True)
"""


@pytest.mark.process
def test_a_copy_of_the_file_has_all_that_was_confirmed_before_it(tmp_path):
    """While another process publishes. The copy works as the file does: in SQLite's WAL mode."""
    (tmp_path / "backup.py").write_text(files_of("backup.md")["backup.py"])
    confirmed = tmp_path / "confirmed"
    command = [sys.executable, "-c", PUBLISHER, f"fdb+sqlite:///{tmp_path}/broker.db", str(confirmed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
        try:
            assert publisher.stdout.readline() == "200 confirmed\n"
            before = confirmed.stat().st_size
            subprocess.run([sys.executable, "backup.py", "broker.db", "copy.db"], cwd=tmp_path, check=True)
            after = confirmed.stat().st_size
        finally:
            publisher.kill()
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with Broker.open(f"fdb+sqlite:///{tmp_path}/copy.db") as broker:
        assert before <= broker.queue("jobs").stats().delayed <= after + 1
