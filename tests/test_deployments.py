"""Each documented deployment is attacked as it stands on its page; only ports and paths are others.

The dashboard behind nginx, as a stranger and as another site's page would; the units, started with their own
environment only; what the manifests and the Compose file promise of a container that was broken into.
"""

import configparser
import os
import re
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPSConnection
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml
from kit.processes import DEADLINE_S

from kombu_fdb import Broker

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TOKEN = "a token of enough letters"
NAME = "shop.example.com"


def block(page, beginning):
    """The one of the page that begins so."""
    (found,) = [text for _, text in FENCE.findall((DOCS / page).read_text()) if text.startswith(beginning)]
    return found


@pytest.fixture
def shop(tmp_path):
    """The project of the how-tos, with the programs of an activated environment. Stands for /opt/shop."""
    folder = tmp_path / "opt"
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, what in (("celery", f"-P {ROOT / 'tests/kit/celery_program.py'}"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
        (programs / name).chmod(0o755)
    (folder / "shop.py").write_text(block("how-to/docker-compose.md", "# shop.py"))
    return folder


@contextmanager
def running(command, said, **how):
    """The process, when it has said this; what it said before is in ``lines``."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how) as process:
        try:
            process.lines = []
            while True:
                process.lines.append(process.stdout.readline())
                assert process.lines[-1], "".join(process.lines)
                if said in process.lines[-1]:
                    break
            yield process
        finally:
            process.kill()


# -- nginx -------------------------------------------------------------------------------------------------------------

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log stderr; events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{http};
        listen 127.0.0.1:{https} ssl;
        ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
        {location}
    }}
}}
"""


class Visitor:
    """At nginx, with the cookies that it was given."""

    def __init__(self, connect):
        self.connect = connect
        self.cookies = {}

    def ask(self, path, fields=None, **headers):
        headers = {
            "Host": NAME,
            "Accept": "text/html",
            **{name.replace("_", "-"): each for name, each in headers.items()},
        }
        headers["Cookie"] = "; ".join(f"{name}={each.value}" for name, each in self.cookies.items())
        body = None if fields is None else urlencode(fields)
        if body is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        with closing(self.connect()) as connection:
            connection.request("GET" if fields is None else "POST", path, body, headers)
            answer = connection.getresponse()
            for given in answer.msg.get_all("Set-Cookie") or ():
                self.cookies.update(SimpleCookie(given))
            answer.text = answer.read().decode()
        return answer

    def log_in(self, token=TOKEN, **headers):
        page = self.ask("/fdb/login").text
        (form_token,) = re.findall(r'name="form_token" value="([^"]+)"', page)
        return self.ask("/fdb/login", {"form_token": form_token, "token": token}, **headers)


def command_of_the_page(shop, token_file):
    command = block("dashboard.md", "celery -A shop fdb web --root-path").replace("\\\n", " ")
    assert "/etc/shop/dashboard.token" in command
    words = shlex.split(command.replace("/etc/shop/dashboard.token", str(token_file)))
    return [str(shop / ".venv/bin" / words[0]), *words[1:], "--port", "0"]


@pytest.fixture
def environment(shop, tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    with Broker.open(url) as broker:
        broker.queue("jobs").put("a")
        yield {"PATH": os.environ["PATH"], "SHOP_BROKER": url, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def site(shop, environment, tmp_path):
    """nginx and the dashboard, as the page has them. Makes visitors, by HTTP or HTTPS."""
    pytest.importorskip("uvicorn", reason="the dashboard's libraries are not installed")
    for program in ("nginx", "openssl"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"{program} is not installed")
    token_file = tmp_path / "dashboard.token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    key = ["-keyout", f"{tmp_path}/key.pem", "-out", f"{tmp_path}/cert.pem", "-subj", f"/CN={NAME}"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *key]
    subprocess.run(make, check=True, capture_output=True)
    command = command_of_the_page(shop, token_file)
    with running(command, "serving http", cwd=shop, env=environment) as dashboard:
        served = re.search(r"http://(127\.0\.0\.1:\d+)/", dashboard.lines[-1])[1]
        location = block("dashboard.md", "location /fdb/ {")
        assert "http://127.0.0.1:9810/" in location, "the port that the command has without being told"
        with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as https:
            ports = {"http": http.getsockname()[1], "https": https.getsockname()[1]}
            text = NGINX.format(folder=tmp_path, location=location.replace("127.0.0.1:9810", served), **ports)
            (tmp_path / "nginx.conf").write_text(text)
            files = (http.fileno(), https.fileno())
            passed = {
                **environment,
                "NGINX": "".join(f"{each};" for each in files),
            }  # it takes these over, as they listen
            passed["PATH"] += ":/usr/sbin"
            command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
            with subprocess.Popen(command, env=passed, pass_fds=files) as nginx:
                context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
                context.check_hostname = False
                at = {"timeout": DEADLINE_S}
                connect = {
                    "http": lambda: HTTPConnection("127.0.0.1", ports["http"], **at),
                    "https": lambda: HTTPSConnection("127.0.0.1", ports["https"], context=context, **at),
                }
                try:
                    yield lambda scheme="http": Visitor(connect[scheme])
                finally:
                    nginx.terminate()  # its workers with it


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nginx_leads_to_pages_under_its_prefix(site, scheme):
    for forged in ("http", "https"):  # nginx says how the browser came, whatever a client sends
        visitor = site(scheme)
        answer = visitor.log_in(X_Forwarded_Proto=forged, Origin=f"{scheme}://{NAME}")
        assert (answer.status, answer.getheader("location")) == (303, "/fdb/")
        for cookie in visitor.cookies.values():
            assert bool(cookie["secure"]) is (scheme == "https")
            assert (cookie["path"], cookie["samesite"].lower()) == ("/fdb/", "strict")
            assert cookie["httponly"]
    page = visitor.ask("/fdb/queues")
    assert page.status == 200
    assert 'href="/fdb/queue?queue=jobs"' in page.text
    with closing(visitor.connect()) as connection:  # which nginx does not hold back
        cookies = "; ".join(f"{name}={each.value}" for name, each in visitor.cookies.items())
        connection.request("GET", "/fdb/events", headers={"Host": NAME, "Cookie": cookies})
        answer = connection.getresponse()
        assert answer.status == 200
        while b"event: look" not in answer.readline():
            pass


def test_behind_nginx_a_forged_address_buys_no_guess(site):
    statuses = [
        site().log_in("x" * 20, X_Forwarded_For=f"10.0.0.{number}", Forwarded=f"for=10.0.0.{number}").status
        for number in range(14)
    ]
    assert statuses[:10] == [403] * 10
    assert 429 in statuses[10:]


def test_behind_nginx_nothing_is_seen_without_the_token_nor_by_another_name(site):
    for path in ("/fdb/", "/fdb/queues", "/fdb//queues", "/fdb/queue?queue=jobs", "/fdb/%2e/queues", "/fdb/act"):
        answer = site().ask(path)
        assert answer.status in {303, 404}, path
        assert "jobs" not in answer.text
        assert (answer.getheader("location") or "/fdb/login").startswith("/fdb/login"), path
    assert site().ask("/fdb/events").status == 401
    for path in ("/fdb/login", "/fdb/queues", "/fdb/static/live.js"):
        assert site().ask(path, Host="evil.example").status == 421
        assert site().ask(path, Host="evil.example", X_Forwarded_Host=NAME).status == 421


def test_behind_nginx_another_sites_form_is_refused(site):
    visitor = site()
    visitor.log_in()
    (form_token,) = re.findall(r'name="form_token" value="([^"]+)"', visitor.ask("/fdb/queue?queue=jobs").text)[:1]
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "same-site"}):
        assert visitor.ask("/fdb/logout", {"form_token": form_token}, **headers).status == 403
    assert visitor.ask("/fdb/queues").status == 200, "still logged in"


@pytest.mark.parametrize("text", ["", "   \n"])
def test_the_command_behind_nginx_does_not_start_without_a_token(shop, environment, tmp_path, text):
    pytest.importorskip("uvicorn", reason="the dashboard's libraries are not installed")
    (tmp_path / "empty").write_text(text)
    command = command_of_the_page(shop, tmp_path / "empty")
    refused = subprocess.run(
        command, cwd=shop, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert refused.returncode != 0
    assert "fewer than 16 characters" in refused.stderr
    at = command.index("--token-file")
    without = [*command[:at], *command[at + 2 :]]
    environment["CELERY_FDB_WEB_TOKEN"] = text
    refused = subprocess.run(
        without, cwd=shop, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert refused.returncode != 0
    assert "environment variable with the token is empty" in refused.stderr or "fewer than 16" in refused.stderr


# -- systemd -----------------------------------------------------------------------------------------------------------

UNITS = ("shop-worker", "shop-beat", "shop-metrics")


class Unit:
    """A unit, with /opt/shop and /var/lib/shop in other places."""

    def __init__(self, name, shop, state):
        text = block("how-to/systemd.md", f"# {name}.service")
        parsed = configparser.ConfigParser(interpolation=None)
        parsed.optionxform = str
        parsed.read_string(text.replace("/opt/shop", str(shop)).replace("/var/lib/shop", str(state)))
        self.service = parsed["Service"]
        name, _, value = self.service["Environment"].partition("=")
        self.environ = {name: value}

    def command(self, line):
        text = self.service[line]
        for name, value in self.environ.items():
            text = text.replace(f"${{{name}}}", value)
        assert "$" not in text
        return shlex.split(text)

    def how(self):
        """systemd gives a service no more than this; and where our package stands, which is installed there."""
        environ = {**self.environ, "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        mask = int(self.service["UMask"], 8)
        return {"cwd": self.service["WorkingDirectory"], "env": environ, "umask": mask}


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_can_do_no_more_than_it_needs(name, shop, tmp_path):
    service = Unit(name, shop, tmp_path).service
    wanted = {"NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes"}
    assert {each: service.get(each) for each in wanted} == wanted
    assert service["User"] not in {"root", "0"}
    # The rest of the file system is read-only, and a file of SQLite has files beside it.
    assert (service["StateDirectory"], service["StateDirectoryMode"], service["UMask"]) == ("shop", "0700", "0077")


@pytest.mark.parametrize(
    ("name", "said", "option"),
    [
        ("shop-worker", " ready.", ["--concurrency", "1"]),
        ("shop-beat", "beat: Starting", []),
        ("shop-metrics", "serving", []),
    ],
)
def test_a_unit_runs_with_its_own_environment_and_keeps_its_files_private(shop, tmp_path, name, said, option):
    state = tmp_path / "state"
    state.mkdir(0o700)
    unit = Unit(name, shop, state)
    worker = Unit("shop-worker", shop, state)
    subprocess.run(worker.command("ExecStartPre"), check=True, timeout=DEADLINE_S, capture_output=True, **worker.how())
    command = [("0" if each == "9808" else each) for each in unit.command("ExecStart")] + option
    with Broker.open(unit.environ["SHOP_BROKER"]) as broker:
        broker.queue("jobs").put("a")
    with running(command, said, **unit.how()) as process:
        if name == "shop-metrics":
            (served,) = re.findall(r"http://([\d.]+:\d+)/", process.lines[-1])
            assert served.startswith("127.0.0.1:")
            for host, status in ((served, 200), ("localhost", 200), ("evil.example", 421)):
                with closing(HTTPConnection(served, timeout=DEADLINE_S)) as connection:
                    connection.request("GET", "/metrics", headers={"Host": host})
                    answer = connection.getresponse()
                    assert (answer.status, b'queue="jobs"' in answer.read()) == (status, status == 200)
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in state.iterdir()}
        assert "broker.db" in modes
        assert {name for name, mode in modes.items() if mode & 0o077} == set()
        end(process)


def end(process):
    """And a worker's children with it. Again: Python ignores what a signal handler raises out of a finalizer."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        process.terminate()
        try:
            process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < deadline, "it does not end"
        else:
            return


# -- containers --------------------------------------------------------------------------------------------------------


def pods():
    for beginning in ("# workers.yaml", "# metrics.yaml"):
        for each in yaml.safe_load_all(block("how-to/kubernetes.md", beginning)):
            if each["kind"] == "Deployment":
                yield pytest.param(each["spec"]["template"]["spec"], id=each["metadata"]["name"])


@pytest.mark.parametrize("pod", list(pods()))
def test_a_pod_can_do_no_more_than_it_needs(pod):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] >= 1000, "a number: Kubernetes can't tell whether a name is root"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    writable = {"/fdb", "/tmp"}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")} <= writable
        assert not [each for each in container.get("env", ()) if "@" in each["value"]], "no password in plain sight"
    (secret,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert secret["defaultMode"] == 0o440


@pytest.mark.parametrize("pod", list(pods()))
def test_a_pods_copy_of_the_secret_is_for_its_user_only_and_can_be_written(pod, tmp_path):
    """The client writes to it when coordinators move. The command is run."""
    secret = yaml.safe_load(block("how-to/kubernetes.md", "# cluster-file.yaml"))["stringData"]
    (tmp_path / "secret").mkdir()
    (tmp_path / "fdb").mkdir()
    for name, text in secret.items():
        assert "REPLACEME" in text, "not a password that a reader could leave as it is"
        (tmp_path / "secret" / name).write_text(text)
        (tmp_path / "secret" / name).chmod(0o440)
    (copy,) = pod["initContainers"]
    command = [f"{tmp_path}{each}" if each.startswith("/") else each for each in copy["command"]]
    subprocess.run(command, check=True)
    copied = tmp_path / "fdb" / "fdb.cluster"
    assert stat.S_IMODE(copied.stat().st_mode) == 0o600
    assert copied.read_text() == secret["fdb.cluster"]


def test_only_prometheus_reaches_the_exporter_and_nothing_else_is_reached_at_all():
    kinds = {each["kind"]: each for each in yaml.safe_load_all(block("how-to/kubernetes.md", "# metrics.yaml"))}
    (ingress,) = kinds["NetworkPolicy"]["spec"]["ingress"]
    assert kinds["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress"]
    assert ingress["from"], "an empty list would let in everybody"
    assert kinds["Service"]["spec"].get("type", "ClusterIP") == "ClusterIP"
    (probed,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert probed["readinessProbe"]["tcpSocket"]["port"] == probed["ports"][0]["name"]


def test_a_composed_service_can_do_no_more_than_it_needs():
    services = yaml.safe_load(block("how-to/docker-compose.md", "# compose.yaml"))["services"]
    for name in ("worker", "metrics"):
        service = services[name]
        assert service["read_only"] is True, name
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert service["tmpfs"] == ["/tmp"]
    published = [port for each in services.values() for port in each.get("ports", ())]
    assert published == ["127.0.0.1:9808:9808"], "else the exporter, which has no login, is open to the network"


def test_the_image_is_not_roots_and_keeps_its_cluster_file_to_itself(tmp_path):
    dockerfile = block("how-to/docker-compose.md", "# Dockerfile")
    user = re.search(r"^USER (\S+)$", dockerfile, re.MULTILINE)[1]
    assert f"useradd --create-home --uid 1000 {user}" in dockerfile
    assert dockerfile.index("USER ") < dockerfile.index("COPY ")
    path = Path(re.search(r"^ENV FDB_CLUSTER_FILE=(\S+)$", dockerfile, re.MULTILINE)[1])
    assert path.parent == Path("/tmp"), "all that can be written to"
    entry_point = yaml.safe_load(re.search(r"^ENTRYPOINT (.+)$", dockerfile, re.MULTILINE)[1])
    environ = {"FDB_CLUSTER_FILE": str(tmp_path / path.name), "FDB_CLUSTER_FILE_CONTENTS": "shop:cluster@a,b"}
    command = [*entry_point, "/bin/echo", "a word", "$HOME"]
    said = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout == "a word $HOME\n"
    assert (tmp_path / path.name).read_text() == "shop:cluster@a,b\n"
    assert stat.S_IMODE((tmp_path / path.name).stat().st_mode) == 0o600
