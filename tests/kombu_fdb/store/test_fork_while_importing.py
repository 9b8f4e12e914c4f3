"""A fork while another thread opens the process's first store: the child can open it too."""

from kit.processes import run_python

PROGRAM = """
import os, sys, threading, time
from kombu_fdb.api.broker import Broker

url, begun = sys.argv[1], threading.Event()

class Slow:
    def find_spec(self, name, *_):
        if name == "kombu_fdb.store.sqlite.wakeups":
            begun.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=lambda: Broker.open(url).close())
thread.start()
begun.wait(10)
child = os.fork()
if not child:
    Broker.open(url).close()
    os._exit(0)
for _ in range(100):
    if os.waitpid(child, os.WNOHANG)[0]:
        thread.join()
        sys.exit(0)
    time.sleep(0.1)
os.kill(child, 9)
sys.exit("the child hangs")
"""


def test_a_fork_while_a_store_is_imported_leaves_the_child_able_to_open_it(tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    run_python("-c", PROGRAM, url)
