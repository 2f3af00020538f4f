"""The internal protocol's parser."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_concurrent_first_requests_do_not_crash() -> None:
    """Runs in fresh processes: msgspec builds a type's table at its first use in a process."""
    program = """
import sys, threading
from shared.wire import parse_generate_request
sys.setswitchinterval(1e-6)
body = b'{"prompt": "a", "sampling": {"top_k": 3}, "group": {"id": "g", "size": 3}, "request_id": "r"}'
together = threading.Barrier(8)
def first():
    together.wait()
    parse_generate_request(body)
threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=30, check=False)
        assert done.returncode == 0
