"""What mypy and pyright make of the public face: ``tests/typing/accepted.py`` and ``tests/typing/refused.py``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "typing"

Lines = dict[tuple[str, int], str]


def run_mypy() -> Lines:
    command = [sys.executable, "-m", "mypy", "--strict", "--explicit-package-bases", "--no-error-summary", str(CASES)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    found = re.findall(r"^.*?([\w.]+):(\d+): error: (.*)$", run.stdout, re.MULTILINE)
    return {(file, int(line)): text for file, line, text in found}


def run_pyright() -> Lines:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(CASES)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    report = json.loads(run.stdout[run.stdout.index("{") :])
    assert report["summary"]["filesAnalyzed"] >= 3
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    }


@pytest.mark.parametrize("run", [run_mypy, run_pyright])
def test_type_checkers(run):
    reported = run()
    expected = {
        (path.name, number)
        for path in CASES.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.endswith("# error")
    }
    assert expected
    missed = sorted(expected - reported.keys())
    surplus = {place: text for place, text in reported.items() if place not in expected}
    assert (missed, surplus) == ([], {})
