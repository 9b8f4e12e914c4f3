"""What ``.github`` asks for exists, asks for no more rights than it needs, and is what docs/versions.md promises."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from kit.processes import run_python

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="an sdist has no workflows")
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
PAGES = (GITHUB / "pull_request_template.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run", ROOT / ".ci" / "nightly")
#: Rights beyond reading the repository: workflow, job.
MORE_RIGHTS = {
    ("docs", "deploy"): {"pages": "write", "id-token": "write"},
    ("release", "attest"): {"id-token": "write", "attestations": "write"},
    ("release", "publish"): {"id-token": "write"},
    ("release", "announce"): {"contents": "write"},
}
SCHEMAS = {
    "workflows/*.yml": "vendor.github-workflows",
    "actions/*/action.yml": "vendor.github-actions",
    "dependabot.yml": "vendor.dependabot",
    "ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
}


def load(path):
    return yaml.safe_load(path.read_text())


@pytest.fixture(
    params=[*WORKFLOWS, *GITHUB.glob("actions/*/action.yml")], ids=lambda path: path.parent.name + path.stem
)
def steps(request):
    """Those of a file."""
    text = load(request.param)
    return [step for job in text.get("jobs", {"": text.get("runs")}).values() for step in job.get("steps", [])]


def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


# -- what is there -----------------------------------------------------------------------------------------------------


def targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def environments():
    text = (ROOT / "tox.ini").read_text()
    return set(re.findall(r"^\[testenv:([\w-]+)\]", text, re.MULTILINE)) | {"py", "py311", "py312", "py313", "py314"}


def asked_of_make(text):
    """``make lint types ARGS="..."`` asks for two targets; what a matrix fills in is looked up there."""
    for line in re.findall(r"\bmake((?: [a-z][a-z-]*)+)", text):
        yield from line.split()


def test_a_step_asks_for_what_there_is(steps):
    for step in steps:
        run = step.get("run", "")
        assert set(asked_of_make(run)) <= targets()
        assert set(re.findall(r"tox (?:run )?-e ([\w-]+)", run)) <= environments()
        for script in re.findall(r"(?:^|\s)(\.ci/\w+|[\w/]+\.py)\b", run):
            assert (ROOT / script).exists(), script
        if step.get("uses", "").startswith("./"):
            assert (ROOT / step["uses"]).exists(), step["uses"]


def test_what_the_matrix_makes_exists():
    assert set(load(GITHUB / "workflows" / "ci.yml")["jobs"]["check"]["strategy"]["matrix"]["target"]) <= targets()


def test_a_night_is_the_same_on_one_machine_and_on_many():
    """The tests of the night ran on one only, and what was fetched for the others had no release to upgrade from."""
    jobs = load(GITHUB / "workflows" / "nightly.yml")["jobs"]
    runs = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    here = (ROOT / ".ci" / "nightly").read_text()
    assert set(asked_of_make("\n".join(runs.values()))) == set(asked_of_make(here))
    assert 'make test ARGS="-m night"' in here
    for name in ("night", "network"):
        assert jobs[name]["steps"][0]["with"]["fetch-depth"] == 0
    assert 'make test ARGS="-m night"' in runs["night"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_asks_for_what_there_is(page):
    code = re.findall(r"(?:`|^ *)(make [^`#\n]+)", page.read_text(), re.MULTILINE)
    asked = [target for each in code for target in asked_of_make(each)]
    assert asked or page.name == "run"
    assert set(asked) <= targets()


def test_every_target_of_make_runs_an_environment_that_exists():
    assert set(re.findall(r"-e ([a-z][\w-]*)", (ROOT / "Makefile").read_text())) <= environments()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_ends_and_calls_what_can_be_called(path):
    for name, job in load(path)["jobs"].items():
        if "uses" in job:
            assert "workflow_call" in load(ROOT / job["uses"])[True]  # YAML reads the key `on` as true
        else:
            assert job.get("timeout-minutes"), name


# -- what is allowed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_a_job_has_what_it_needs(path):
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions", {}) == MORE_RIGHTS.get((path.stem, name), {}), name
    assert "pull_request_target" not in workflow[True]


def test_a_step_is_pinned_and_runs_no_text_of_strangers(steps):
    """A tag can be moved by an attacker who takes over its repository; a commit can't."""
    for step in steps:
        action = step.get("uses", "./")
        assert action.startswith("./") or re.search(r"@[0-9a-f]{40}$", action), action
        if action.startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", ""), "pass it by env"


def test_a_commit_is_that_of_one_version_everywhere():
    """Dependabot reads the version in the comment, and keeps both in step."""
    text = "\n".join(path.read_text() for path in GITHUB.rglob("*.yml"))
    pins = re.findall(r"uses: (actions/[\w-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$", text, re.MULTILINE)
    assert len(pins) == text.count("uses: actions/")
    assert len(set(pins)) == len({action for action, _, _ in pins})


def test_there_are_no_secrets():
    """The index trusts the workflow, and GitHub gives each job a token of its own."""
    assert not [path.name for path in WORKFLOWS if "secrets." in path.read_text()]


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_github_understands_it(pattern):
    pytest.importorskip("check_jsonschema")
    found = [*GITHUB.glob(pattern)]
    assert found
    run_python("-m", "check_jsonschema", "--builtin-schema", SCHEMAS[pattern], *found)


# -- what is said ------------------------------------------------------------------------------------------------------


def shown():
    return re.search(r"<!-- matrix -->\n(.*?)<!-- /matrix -->", (ROOT / "docs" / "versions.md").read_text(), re.DOTALL)[
        1
    ]


def matrix():
    """The page's rows of what is tested."""
    return dict(re.findall(r"^\| ([A-Z].+?) \| ([^|]+?) \|$", shown(), re.MULTILINE))


def versions_of(row):
    return re.findall(r"\d+\.\d+", matrix()[row])


#: What the page calls a row of versions, and the factor of tox.
FACTORS = {"Celery": "celery", "Django": "django", "binding": "fdb"}


def cells():
    """The page's cells, by the name of their environment."""
    lines = re.findall(r"^\| (?:\| Python|\w+ \d\.\d).*$", shown(), re.MULTILINE)
    (_, *pythons), *rows = [[each.strip() for each in line[1:-1].split("|")] for line in lines]
    named = [(f"{python}-{row[0]}", state) for row in rows for python, state in zip(pythons, row[1:], strict=True)]
    return {_environment(name): state for name, state in named if state}


def _environment(cell):
    python, kind, version = re.fullmatch(r"Python (3\.\d+)-(\w+) (\d\.\d)", cell).groups()
    return f"py{python}-{FACTORS[kind]}{version}".replace(".", "")


def expanded(name):
    """As tox does: ``py3{11,12}-django42`` is two."""
    parts = [part.split(",") if number % 2 else [part] for number, part in enumerate(re.split(r"[{}]", name))]
    return {"".join(each) for each in itertools.product(*parts)}


def matrix_sections():
    """Those of tox.ini whose environments are cells: their names, and their lines."""
    text = (ROOT / "tox.ini").read_text()
    sections = re.findall(r"^\[testenv:([^]]+)\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    return [(set().union(*map(expanded, names.split(", "))), body) for names, body in sections if "= matrix" in body]


def test_every_python_that_is_promised_is_tested():
    tested = load(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    classifiers = settings()["project"]["classifiers"]
    assert tested == [each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)]
    assert tested == versions_of("Python")
    (listed,) = re.findall(r"^env_list = .*py3\{([\d,]+)\}", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    assert [f"3.{minor}" for minor in listed.split(",")] == tested


def test_the_versions_on_the_page_are_those_that_are_asked_for():
    asked = {re.split(r"[><=]", each)[0]: each for each in settings()["project"]["dependencies"]}
    assert asked["celery"] == f"celery>={versions_of('Celery, kombu')[0]}"
    assert asked["kombu"] == f"kombu>={versions_of('Celery, kombu')[0]}"
    assert asked["foundationdb"] == f"foundationdb>={versions_of('FoundationDB')[1]},<7.4"
    assert settings()["project"]["optional-dependencies"]["django"][0] == f"django>={versions_of('Django')[0]}"
    classifiers = [each.rpartition(" ")[2] for each in settings()["project"]["classifiers"] if ":: Django ::" in each]
    assert classifiers == versions_of("Django")


def test_every_cell_of_the_matrix_is_an_environment_that_ci_runs():
    in_tox = set().union(*(names for names, _ in matrix_sections()))
    in_ci = load(GITHUB / "workflows" / "ci.yml")["jobs"]["versions"]["strategy"]["matrix"]["cell"]
    assert set(cells()) == in_tox
    assert sorted(in_ci) == sorted(in_tox)
    assert set(cells().values()) <= {"ran", "not yet"}


def test_the_rows_of_the_matrix_are_the_versions_above_it():
    rows = {kind: [] for kind in FACTORS}
    for kind, version in re.findall(r"^\| (\w+) (\d\.\d) \|", shown(), re.MULTILINE):
        rows[kind].append(version)
    assert rows["Celery"] == versions_of("Celery, kombu")
    assert rows["Django"] == versions_of("Django")
    assert rows["binding"] == versions_of("FoundationDB")[1:]
    assert {f"Python {each}" for each in versions_of("Python")} == set(re.findall(r"Python 3\.\d+", shown()))


@pytest.mark.parametrize(("names", "body"), matrix_sections())
def test_a_cell_installs_the_versions_in_its_name_and_runs_tests_that_exist(names, body):
    packages = {"celery": ["celery", "kombu"], "django": ["django"], "fdb": ["foundationdb"]}
    for name in names:
        kind, major, minor = re.fullmatch(r"py3\d\d-([a-z]+)(\d)(\d)", name).groups()
        pinned = re.findall(rf"^ +{kind}{major}{minor}: (\S+)$", body, re.MULTILINE)
        assert pinned == [f"{package}=={major}.{minor}.*" for package in packages[kind]]
    (chosen,) = re.findall(r"\{\[sets\](\w+)\}", body)
    (paths,) = re.findall(rf"^{chosen} =\n((?: +\S+\n)+)", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    assert [path for path in paths.split() if not (ROOT / path).exists()] == []


def test_the_floors_are_those_of_the_extra_and_its_tests_exist():
    extra = settings()["project"]["optional-dependencies"]["web"]
    (body,) = re.findall(r"^\[testenv:floors\]\n(.*?)(?=^\[)", (ROOT / "tox.ini").read_text(), re.MULTILINE | re.DOTALL)
    pinned = dict(re.findall(r"^ +(\S+)==(\S+)$", body, re.MULTILINE))
    assert pinned.keys() == {each.partition(">=")[0] for each in extra}
    for each in extra:
        name, _, floor = each.partition(">=")
        assert pinned[name] in {floor, f"{floor}.0"}
    (paths,) = re.findall(r"^commands = .*\{posargs:(.+)\}$", body, re.MULTILINE)
    assert [path for path in paths.split() if not (ROOT / path).exists()] == []


def test_one_version_of_foundationdb_is_tested_and_shown():
    installed = load(GITHUB / "actions" / "foundationdb" / "action.yml")["inputs"]["version"]["default"]
    shown = set(re.findall(r"(?<![\d.])7\.\d\.\d+", (ROOT / "docs" / "how-to" / "docker-compose.md").read_text()))
    assert shown == {installed}
    assert versions_of("FoundationDB")[0] == installed.rpartition(".")[0]


def test_pre_commit_has_the_versions_of_make_lint():
    hooks = load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    asked = {each for hook in hooks if hook["id"] != "workflows" for each in hook["additional_dependencies"]}
    assert asked == set(settings()["dependency-groups"]["lint"])
