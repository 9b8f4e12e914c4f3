"""The shape of the house (CONTRIBUTING.md): no circles of files, at the root what users name."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "kombu_fdb", ROOT / "celery_fdb", ROOT / "tests" / "kit")
#: What a function of the engine takes at most, besides itself: else some of it is a noun without a name.
PARAMETERS = 5
#: How a message is taken out of its queue and put into one; of the engine's files only one may do so.
MOVES = (
    "effects.ready(",
    "effects.unready(",
    "effects.came(",
    "effects.went(",
    "effects.delayed(",
    "clear_range(*work.keys.bodies(record.",
)
#: What users import or run by name; everything else has a room of its own.
PUBLIC = {
    "kombu_fdb": {"doctor", "errors", "model"},
    "celery_fdb": {"apps", "beat", "control", "installing"},
}


@cache
def modules():
    """Every module by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path):
    """Modules of ours that ``path`` imports anywhere in it: in functions, and for types only, too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            names.update(inner & modules().keys() or {node.module})
    return names & modules().keys()


def test_no_circle_of_files():
    graph = {name: imported(path) - {name} for name, path in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", PUBLIC)
def test_the_root_holds_nothing_but_what_users_name(package):
    held = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__", "__main__"}
    assert held == PUBLIC[package]


def test_each_type_ignore_has_its_reason():
    lines = [
        f"{name}: {line.strip()}"
        for name, path in modules().items()
        for line in path.read_text().splitlines()
        if re.search(r"# type: ignore\b", line) and not re.search(r"# type: ignore\[[\w,-]+\]  # \w", line)
    ]
    assert not lines


def test_no_name_says_nothing():
    empty = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
    assert not [name for name in modules() if empty & set(name.rsplit(".", 1)[-1].split("_"))]


def test_prose_names_its_subject():
    """The sweeper, a consumer, an operator: words that leave open who does it hide a missing thought."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    vague = re.compile(r"\b([Nn]obody|[Ss]omebody|[Ww]hoever)\b")
    assert not [
        f"{path.name}: {line.strip()}"
        for path in [*modules().values(), *pages]
        if "tests" not in path.parts
        for line in path.read_text().splitlines()
        if vague.search(line)
    ]


@pytest.mark.parametrize("package", ["kombu_fdb", "celery_fdb"])
def test_the_tests_mirror_the_packages(package):
    """A folder of tests stands where the folder, or the module, that it tests does."""
    root = ROOT / "tests" / package
    for folder in {path.parent.relative_to(root) for path in root.rglob("test_*.py")}:
        tested = ROOT / package / folder
        assert tested.is_dir() or tested.with_suffix(".py").is_file(), f"{folder} tests no folder of {package}"


def functions(folder):
    """Every function in it, with its place."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def parameters(function):
    taken = function.args
    named = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    return [each.arg for each in named if each is not None and each.arg not in {"self", "cls"}]


def test_a_function_of_the_engine_takes_five_parameters_at_most():
    clumps = {
        place: taken
        for place, function in functions(ROOT / "kombu_fdb" / "engine")
        if len(taken := parameters(function)) > PARAMETERS
    }
    assert clumps == {}


@pytest.mark.parametrize("move", MOVES)
def test_one_module_of_the_engine_moves_messages(move):
    engine = ROOT / "kombu_fdb" / "engine"
    found = [str(path.relative_to(engine)) for path in engine.rglob("*.py") if move in path.read_text()]
    assert found == ["messages/message.py"]


#: What has no verb in the API: a copy of a message that is acknowledged already.
INSIDE = {"celery_fdb/tasks/failures.py": "channel.engine.publisher.bury_copy("}
ENGINE = re.compile(r"\b(broker|source|target|channel)\.(_?engine|_client|connection\.client)\b")


def test_celery_fdb_asks_the_api_and_not_the_engine():
    for path in (ROOT / "celery_fdb").rglob("*.py"):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        assert not ENGINE.search(text.replace(INSIDE.get(name, "\0"), "")), name


def avoided():
    """Words that the glossary rejects in its last column, and the word that it has instead."""
    found = {}
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[0].startswith("**"):
            for each in cells[2].split(","):
                if each.strip():
                    found[each.strip()] = cells[0].strip("*")
    return found


def test_the_code_has_one_word_for_it(subtests):
    """In names: of functions, classes, arguments, variables and modules. What stands in the store keeps its tag."""
    used = [
        (path, each, words_in(each))
        for name, path in modules().items()
        if not name.startswith("kit")
        for each in {*names_in(path), *name.split(".")}
    ]
    for avoid, instead in sorted(avoided().items()):
        with subtests.test(avoid):
            parts = avoid.split()
            found = [(path, each) for path, each, words in used if stands_in(parts, words)]
            assert not found, f"the glossary says {instead}"


def names_in(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
    return found


def words_in(name):
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")


def stands_in(parts, words):
    return any(words[at : at + len(parts)] == parts for at in range(len(words)))
