"""The entry point that tells kombu our URL schemes runs in every process that imports kombu: it has to be harmless."""

from pathlib import Path

import pytest
from kit.processes import run_python

ROOT = Path(__file__).parents[1]


def python(code):
    """Run ``code`` in a fresh interpreter that imports from the checkout."""
    done = run_python("-c", code, cwd=ROOT)
    assert done.stderr == ""
    return done.stdout


def test_registers_both_schemes_and_imports_no_transport():
    said = python("""
import sys
import _kombu_fdb_autoload as autoload
from kombu.transport import TRANSPORT_ALIASES
assert autoload.FAILURE is None
for scheme in ("fdb", "fdb+sqlite"):
    print(scheme, TRANSPORT_ALIASES[scheme])
print(sorted(name for name in sys.modules if name.startswith(("kombu_fdb", "celery", "fdb"))))
""")
    assert said == "fdb kombu_fdb.transport:Transport\nfdb+sqlite kombu_fdb.transport:Transport\n[]\n"


def test_does_not_take_a_scheme_that_is_taken():
    said = python("""
from kombu.transport import TRANSPORT_ALIASES
TRANSPORT_ALIASES["fdb"] = "mine:Transport"
import _kombu_fdb_autoload
print(TRANSPORT_ALIASES["fdb"])
""")
    assert said == "mine:Transport\n"


@pytest.mark.parametrize(
    "broken",
    [
        "sys.modules['kombu.transport'] = None",  # raises ImportError
        "sys.modules['kombu.transport'] = types.ModuleType('kombu.transport')",  # has no TRANSPORT_ALIASES
        "sys.modules['kombu.transport'] = m = types.ModuleType('kombu.transport'); m.TRANSPORT_ALIASES = None",
        "sys.modules['kombu'] = None",
    ],
)
def test_never_raises_and_never_prints(broken):
    assert (
        python(f"import sys, types\n{broken}\nimport _kombu_fdb_autoload as a\nprint(a.FAILURE is not None)")
        == "True\n"
    )


def test_is_what_kombu_expects_of_a_serializer_and_decodes_nothing():
    said = python("""
from kombu.serialization import registry, loads
import _kombu_fdb_autoload as autoload
before = set(registry._decoders)
registry.register("kombu-fdb-autoload", *autoload.NOTHING)
assert set(registry._decoders) == before
print("kombu-fdb-autoload" in registry.name_to_type)
""")
    assert said == "True\n"


def test_a_checkout_that_is_not_installed_registers_the_schemes_with_the_transport():
    """As if on PYTHONPATH: kombu finds no entry point of ours."""
    said = python("""
import importlib.metadata
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints(())
import kombu_fdb.transport
from kombu import Connection
print(Connection("fdb+sqlite://").get_transport_cls().__module__)
""")
    assert said == "kombu_fdb.transport.transport\n"
