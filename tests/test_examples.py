"""Every numbered example runs as a person would run it, and shows what its docstring says."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from examples.common import URL_VARIABLE
from tests.helpers import wait_until

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("[0-9]*.py") if not path.stem.endswith("_migration"))
SERVERS = {"07_fastapi", "08_flask", "10_litestar"}
"""These run until they are stopped, and have a test of their own."""

SEEN = {
    "01_enqueue_with_your_data": [
        ("erin's is rolled back, and so is her job", "erin's job, before the rollback: 2 {'order_id': 2}"),
        ("dave's order is committed, and its job with it", "orders: ['dave']"),
        ("both are there, or neither is", "jobs: [('create_invoice', {'order_id': 1}, 'pending')]"),
        ("a worker writes the one invoice", "invoices: [(1, 2500)]"),
        ("a worker writes the one invoice", "jobs: [('create_invoice', {'order_id': 1}, 'done')]"),
    ],
    "02_exactly_once": [
        ("a worker writes the invoice", "unlucky worker: the invoice of order 1 is written"),
        ("is killed before the commit", "unlucky worker: killed by signal 9"),
        ("the job waits as if it had never been touched", "jobs: [('pending', 0)]"),
        ("There is no invoice then", "invoices: []"),
        ("The next worker writes the invoice", "second worker: the invoice of order 1 is written"),
        ("delivered twice", "jobs: [('done', 1)]"),
        ("invoiced once", "invoices: [(1, 9900)]"),
    ],
    "03_idempotency_key": [
        ("the card is charged", "bank: asked to charge 4200 with key 1"),
        ("The second attempt comes with the same key", "bank: asked to charge 4200 with key 1"),
        ("the bank knows it and charges nothing", "bank: was charged before, nothing to do"),
        ("the card is charged", "charges: {'1': 4200}"),
        ("there is one receipt, and it says two attempts", "receipts: [(1, 2)]"),
        ("the line goes dead before the answer", "jobs: [('done', 2, 'ConnectionResetError: the line went dead')]"),
    ],
    "04_one_event_many_consumers": [
        ("The invoice and the receipt are done", "to dave: thank you for 2500 cents"),
        ("three jobs with the same payload", "create_invoice {'order_id': 1} done 1 None"),
        ("three jobs with the same payload", "send_receipt {'order_id': 1} done 1 None"),
        (
            "its job uses up its attempts and goes to the dead letter, where an operator finds it with its error",
            "sync_crm {'order_id': 1} failed 2 ConnectionRefusedError: nobody answers about dave",
        ),
        (
            "queues it again once the address is right",
            "[('create_invoice', 'done', 1), ('send_receipt', 'done', 1), ('sync_crm', 'done', 3)]",
        ),
    ],
    "05_own_worker_loop": [
        ("its lease lapses, and B takes its job back", "B takes back job 1, which was in attempt 1: lease expired"),
        ("it holds attempt 1, and the job is in attempt 2", "A is refused with attempt 1 of job 1"),
        ("the job is in attempt 2", "B did job 1 in attempt 2"),
        ("B does both jobs", "B did job 2 in attempt 1"),
        ("its invoice rolled back", "invoices: [1, 2]"),
        ("then they are deleted", "deleted jobs: [1, 2]"),
    ],
    "06_existing_model": [
        (
            "the new export is built, and an old one that is asked for again; the others are left alone",
            "['export-7.csv', 'export-1001.csv']",
        ),
    ],
    "09_sqlmodel": [
        ("a letter waits", "waiting: write_letter {'hero_id': 1}"),
        ("with the key that the hero got in the flush", "Dear Deadpond, you are number 1. Yours, the bureau"),
        ("the worker writes it", "Dear Deadpond, you are number 1. Again, the bureau"),
        ("counts it on the hero's row", "letters: [2]"),
    ],
    "11_schema_per_tenant": [
        ("number 1 in both schemas", "acme [(1, 'shipped by acme')]"),
        ("each in the schema of its tenant", "bolt [(1, 'shipped by bolt')]"),
    ],
}
"""By example, what its docstring tells, and the line that shows it: all lines, in their order."""


def told(path):
    return " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())


def command(*arguments):
    return [sys.executable, "-W", "error", *arguments]


def environment(url):
    return {**os.environ, URL_VARIABLE: url}


def test_all_are_found():
    assert {path.stem for path in EXAMPLES} >= SEEN.keys() | SERVERS
    assert [path.stem[:2] for path in EXAMPLES] == [f"{n:02}" for n in range(1, len(EXAMPLES) + 1)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_says_what_will_be_seen(path):
    assert len(path.read_text().splitlines()) < 60
    assert "You will see" in told(path)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem not in SERVERS], ids=lambda path: path.stem)
def test_it_shows_what_its_docstring_says(path, database_url):
    ended = subprocess.run(
        command(str(path)), cwd=ROOT, env=environment(database_url), capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert path.stem in SEEN, "say here what it is to show"
    assert ended.stdout.splitlines() == [line for _, line in SEEN[path.stem]]
    for sentence, _ in SEEN[path.stem]:
        assert sentence in told(path)


def test_without_a_database_of_ones_own_it_starts_one(tmp_path):
    without = {name: value for name, value in os.environ.items() if name != URL_VARIABLE}
    ended = subprocess.run(
        command(str(ROOT / "examples/05_own_worker_loop.py")),
        cwd=tmp_path,
        env=without,
        capture_output=True,
        check=True,
    )
    assert b"B did job 1 in attempt 2" in ended.stdout


def fetch(url, method="GET"):
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=20) as answer:  # noqa: S310  ours
        return json.load(answer)


@pytest.mark.parametrize(
    ("name", "port", "answer", "refusal"),
    [
        ("07_fastapi", ["--port", "0"], {"order": 1, "job": 1}, "422"),
        ("08_flask", ["0"], {"order": 1, "job": 1}, "500"),
        ("10_litestar", ["--port", "0"], {"order": 1}, "400"),
    ],
)
def test_servers(name, port, answer, refusal, database_url):
    path = ROOT / "examples" / f"{name}.py"
    [start] = re.findall(r"Start it with ``python ([^`]+)``", told(path))
    curl = re.findall(r"``curl (?:-X (\w+) )?'?localhost:\d+(/[^`']+)'?``", told(path))
    assert curl == [("POST", "/orders?customer=dave&total_cents=2500"), ("", "/invoices")]
    with subprocess.Popen(
        [sys.executable, *start.split(), *port],
        cwd=ROOT,
        env=environment(database_url),
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(server.stderr), daemon=True)
        try:
            base = next(filter(None, (re.search(r"(?i)running on (http://[\w.:]+)", line) for line in server.stderr)))[
                1
            ]
            reader.start()
            assert fetch(base + curl[0][1], "POST") == answer
            wait_until(lambda: fetch(base + curl[1][1]) == [1], "the invoice is written")
            with pytest.raises(urllib.error.HTTPError, match=refusal):
                fetch(f"{base}/orders?customer=dave&total_cents=a+lot", "POST")
            assert fetch(base + curl[1][1]) == [1]
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        reader.join(20)
    text = "".join(lines)
    assert "Application shutdown complete" in text or name == "08_flask"
    assert ("Traceback" in text) is (refusal == "500")  # the refused request is one in Flask, which logs it
