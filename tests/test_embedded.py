"""The embedded server: it starts, it asks for a password, and it leaves nothing behind, whatever happens."""

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, make_url

import sqla_jobqueue.embedded
from sqla_jobqueue.embedded import EmbeddedPostgres, EmbeddedPostgresError, find_bindir
from tests.helpers import driver_url, open_async_engine, wait_until

PACKAGE = Path(sqla_jobqueue.embedded.__file__).parent
IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root drops to another user")
needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into Linux's /proc")

# Starts a server and tells of it: run by itself, so that the process which owns the server can be killed.
OWNER = """
import json, os, sys, time
from sqla_jobqueue.embedded import EmbeddedPostgres
postgres = EmbeddedPostgres().start()
print(json.dumps({
    "server": postgres.pid, "watchdog": postgres._watchdog.pid, "url": postgres.url(driver=""),
    "base": postgres._facts["base"], "uid": os.geteuid(),
}), flush=True)
"""


def query(url: str, statement: str):
    with psycopg.connect(driver_url(url, ""), autocommit=True, connect_timeout=10) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True
        return False
    return state != "Z"


def bases_of_children(watchdog: int) -> set[Path]:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{watchdog}/task/{watchdog}/children").read_text().split()
        directories = {Path(f"/proc/{child}/cwd").readlink() for child in children}
        return {directory for directory in directories if directory.name.startswith("sqla-jobqueue-")}
    return set()


def copy_install(bindir: Path, site: Path) -> Path:
    """Copy the binaries with what they need; returns where their directory is now."""
    install = bindir.parent
    if not (install / "share").is_dir():
        pytest.skip(f"{install} is no complete tree")
    copy = site / install.parent.name / install.name
    shutil.copytree(install, copy, symlinks=True, ignore=shutil.ignore_patterns("include", "doc"))
    vendored = install.parent.parent / f"{install.parent.name}.libs"
    if vendored.is_dir():
        shutil.copytree(vendored, site / vendored.name)
    return copy / bindir.name


@pytest.fixture
def public_dir():
    """A directory that every user can enter, which pytest's own are not: with a copy of this part of the package only."""
    directory = Path(tempfile.mkdtemp(prefix="embedded-test-", dir="/tmp"))
    directory.chmod(0o755)
    shutil.copytree(PACKAGE, directory / "sqla_jobqueue" / "embedded", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "sqla_jobqueue" / "__init__.py").touch()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def data_dir():
    """A path for kept data; not below pytest's tmp_path, which the user nobody cannot enter."""
    directory = Path(tempfile.mkdtemp(prefix="embedded-data-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def owner_process(directory: Path, code: str, *, python: str = sys.executable, **options):
    """Start a server in another process; yields that process and what it tells of the server."""
    env = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "SQLA_JOBQUEUE_PG_BINDIR": str(find_bindir()),
        **options.pop("env", {}),
    }
    process = subprocess.Popen(
        [python, "-c", OWNER + code],
        cwd=directory,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    with process:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture(scope="module")
def postgres():
    with EmbeddedPostgres() as running:
        yield running


class TestConnecting:
    def test_it_starts_in_seconds(self):
        begin = time.monotonic()
        with EmbeddedPostgres() as postgres:
            assert query(postgres.url(), "SELECT 1") == 1
        assert time.monotonic() - begin < 20

    @pytest.mark.parametrize("driver", ["", "psycopg"])
    def test_over_tcp(self, postgres, driver):
        assert query(postgres.url(driver=driver), "SELECT host(inet_client_addr())") == "127.0.0.1"

    def test_over_the_socket(self, postgres):
        assert query(postgres.socket_url(driver=""), "SELECT inet_client_addr()") is None

    def test_sqlalchemy_takes_both_urls(self, postgres):
        for url in (postgres.url(), postgres.socket_url("template1")):
            engine = create_engine(url)
            with engine.connect() as connection:
                assert connection.exec_driver_sql("SELECT current_user").scalar() == "postgres"
            engine.dispose()

    @pytest.mark.parametrize("face", ["url", "socket_url"])
    def test_asyncpg_takes_both_urls(self, postgres, face):
        import asyncio

        async def main():
            async with (
                open_async_engine(getattr(postgres, face)(driver="asyncpg")) as engine,
                engine.connect() as connection,
            ):
                return (await connection.exec_driver_sql("SELECT current_user")).scalar()

        assert asyncio.run(main()) == "postgres"

    @pytest.mark.parametrize("face", ["url", "socket_url"])
    @pytest.mark.parametrize("password", ["wrong", None])
    def test_without_the_password_nobody_gets_in(self, postgres, face, password):
        url = make_url(getattr(postgres, face)())._replace(password=password)
        with pytest.raises(psycopg.OperationalError, match="password"):
            query(url.render_as_string(hide_password=False), "SELECT 1")

    @needs_proc
    def test_the_password_is_nowhere_to_be_seen(self, postgres):
        password = make_url(postgres.url()).password
        assert len(password) >= 32
        assert password not in repr(postgres)
        assert f"127.0.0.1:{postgres.port}" in repr(postgres)
        for process in (postgres.pid, postgres._watchdog.pid):
            assert password not in Path(f"/proc/{process}/cmdline").read_text()
            assert password not in Path(f"/proc/{process}/environ").read_text()
        base = Path(postgres._facts["base"])
        assert base.stat().st_mode & 0o777 == 0o700
        assert not (base / "password").exists()

    def test_the_server_is_the_same_everywhere(self, postgres):
        assert query(postgres.url(), "SHOW timezone") == "UTC"
        assert query(postgres.url(), "SHOW server_encoding") == "UTF8"
        assert query(postgres.url(), "SELECT datcollate FROM pg_database WHERE datname = 'postgres'") == "C"
        assert query(postgres.url(), "SHOW listen_addresses") == "127.0.0.1"
        assert query(postgres.url(), "SHOW password_encryption") == "scram-sha-256"

    @needs_proc
    def test_the_environment_of_the_application_does_not_reach_it(self, monkeypatch):
        monkeypatch.setenv("PGDATA", "/nowhere")
        monkeypatch.setenv("PGPORT", "1")
        monkeypatch.setenv("TZ", "America/New_York")
        monkeypatch.setenv("MY_SECRET", "hunter2")
        with EmbeddedPostgres() as postgres:
            assert query(postgres.url(), "SELECT 1") == 1
            assert "hunter2" not in Path(f"/proc/{postgres.pid}/environ").read_text()

    def test_two_stand_side_by_side(self, postgres):
        with EmbeddedPostgres() as other:
            assert other.port != postgres.port
            query(other.url(), "CREATE TABLE here (id int)")
            assert query(postgres.url(), "SELECT to_regclass('here')") is None
            assert make_url(other.url()).password != make_url(postgres.url()).password
        assert query(postgres.url(), "SELECT 1") == 1


class TestSettings:
    def test_throwaway_data_needs_no_fsync(self, postgres):
        assert query(postgres.url(), "SHOW fsync") == "off"
        assert query(postgres.url(), "SHOW synchronous_commit") == "on"

    def test_durable_and_given_settings(self):
        with EmbeddedPostgres(durable=True, settings={"max_connections": "17", "timezone": "Asia/Tokyo"}) as postgres:
            assert query(postgres.url(), "SHOW fsync") == "on"
            assert query(postgres.url(), "SHOW full_page_writes") == "on"
            assert query(postgres.url(), "SHOW max_connections") == "17"
            assert query(postgres.url(), "SHOW timezone") == "Asia/Tokyo"

    def test_a_given_port(self):
        with EmbeddedPostgres() as first:
            port = first.port
        with EmbeddedPostgres(settings={"port": str(port)}) as second:
            assert second.port == port
            assert query(second.url(), "SHOW port") == str(port)

    def test_a_wrong_setting_is_told_with_the_log(self):
        postgres = EmbeddedPostgres(settings={"no_such_setting": "1"})
        with pytest.raises(EmbeddedPostgresError, match=r'(?s)did not start.*unrecognized.*"no_such_setting"'):
            postgres.start()
        assert repr(postgres) == "<EmbeddedPostgres stopped>"


class TestLifetime:
    def test_stop_leaves_nothing(self):
        postgres = EmbeddedPostgres().start()
        pid, watchdog, base = postgres.pid, postgres._watchdog.pid, Path(postgres._facts["base"])
        assert base.exists()
        postgres.stop()
        assert not base.exists()
        assert not runs(pid)
        assert not runs(watchdog)
        assert "database system is ready" in postgres.log_tail()
        postgres.stop()
        with pytest.raises(EmbeddedPostgresError, match=r"call start\(\)"):
            postgres.url()
        with pytest.raises(EmbeddedPostgresError, match=r"call start\(\)"):
            postgres.restart()

    def test_it_can_be_started_again_but_not_twice(self):
        postgres = EmbeddedPostgres()
        for _ in range(2):
            with postgres:
                query(postgres.url(), "CREATE TABLE fresh (id int)")
                with pytest.raises(EmbeddedPostgresError, match="is running"):
                    postgres.start()

    @pytest.mark.parametrize("immediate", [False, True])
    def test_restart_keeps_port_and_data(self, immediate):
        with EmbeddedPostgres() as postgres:
            url, pid = postgres.url(), postgres.pid
            query(url, "CREATE TABLE kept AS SELECT 1 AS id")
            with psycopg.connect(postgres.url(driver="")) as open_connection:
                postgres.restart(immediate=immediate)
                with pytest.raises(psycopg.OperationalError):
                    open_connection.execute("SELECT 1")
            assert postgres.url() == url
            assert postgres.pid != pid
            assert query(url, "SELECT count(*) FROM kept") == 1
            assert ("automatic recovery" in postgres.log_tail()) is immediate

    def test_an_outage(self):
        with EmbeddedPostgres() as postgres:
            url = postgres.url()
            query(url, "CREATE TABLE kept AS SELECT 1 AS id")
            postgres.stop_server()
            assert postgres.pid == 0
            for refused in (url, postgres.socket_url()):
                with pytest.raises(psycopg.OperationalError):
                    query(refused, "SELECT 1")
            postgres.stop_server()
            postgres.start_server()
            postgres.start_server()
            assert query(url, "SELECT count(*) FROM kept") == 1

    def test_a_killed_server_starts_again_on_its_data(self):
        with EmbeddedPostgres() as postgres:
            query(postgres.url(), "CREATE TABLE kept AS SELECT 1 AS id")
            os.kill(postgres.pid, signal.SIGKILL)
            postgres.restart()
            assert query(postgres.url(), "SELECT count(*) FROM kept") == 1

    def test_the_sigkilled_owner_takes_server_and_files_along(self, public_dir):
        with owner_process(public_dir, "time.sleep(600)") as (owner, facts):
            assert query(facts["url"], "SELECT 1") == 1
            owner.send_signal(signal.SIGKILL)
            wait_until(lambda: not runs(facts["server"]), "the server ends")
            wait_until(lambda: not Path(facts["base"]).exists(), "the directory goes")
            wait_until(lambda: not runs(facts["watchdog"]), "the watchdog ends")

    @needs_proc
    def test_an_owner_that_is_killed_while_starting_leaves_nothing(self, public_dir):
        code = """
import threading
from sqla_jobqueue.embedded import EmbeddedPostgres
postgres = EmbeddedPostgres()
starting = threading.Thread(target=postgres.start)
starting.start()
while not postgres._watchdog:
    pass
print(postgres._watchdog.pid, flush=True)
starting.join()
"""
        env = {**os.environ, "PYTHONPATH": str(public_dir)}
        with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as owner:
            watchdog = int(owner.stdout.readline())
            bases: set[Path] = set()
            wait_until(lambda: bases.update(bases_of_children(watchdog)) or bases, "initdb runs")
            owner.kill()
            wait_until(lambda: not runs(watchdog), "the watchdog ends")
        assert not any(base.exists() for base in bases)

    def test_a_forked_child_does_not_keep_the_server(self, public_dir):
        code = """
child = os.fork()
if child == 0:
    postgres.stop()         # not its own
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""
        with owner_process(public_dir, code) as (owner, facts):
            child = int(owner.stdout.readline())
            try:
                assert query(facts["url"], "SELECT 1") == 1
                owner.kill()
                wait_until(lambda: not runs(facts["server"]), "the server ends")
                wait_until(lambda: not Path(facts["base"]).exists(), "the directory goes")
                assert runs(child)
            finally:
                os.kill(child, signal.SIGKILL)

    def test_an_owner_that_just_ends_leaves_nothing(self, public_dir):
        with owner_process(public_dir, "") as (owner, facts):
            assert owner.wait(20) == 0
            wait_until(lambda: not Path(facts["base"]).exists(), "the directory goes")
            wait_until(lambda: not runs(facts["server"]), "the server ends")

    @pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
    def test_a_sigkilled_watchdog_takes_the_server_along(self):
        with EmbeddedPostgres() as postgres:
            pid, base = postgres.pid, Path(postgres._facts["base"])
            os.kill(postgres._watchdog.pid, signal.SIGKILL)
            wait_until(lambda: not runs(pid), "the server ends")
            with pytest.raises(EmbeddedPostgresError, match="watchdog is gone"):
                postgres.restart()
        assert not base.exists()

    def test_ctrl_c_in_the_terminal_does_not_reach_it(self, public_dir):
        code = """
import signal
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print("armed", flush=True)
time.sleep(600)
"""
        with owner_process(public_dir, code, start_new_session=True) as (owner, facts):
            assert owner.stdout.readline() == "armed\n"
            os.killpg(owner.pid, signal.SIGINT)
            assert owner.stdout.readline() == "interrupted\n"
            os.kill(facts["watchdog"], signal.SIGTERM)
            assert query(facts["url"], "SELECT 1") == 1

    def test_it_keeps_no_descriptor_of_its_owner(self):
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        with EmbeddedPostgres() as postgres:
            os.close(writing)
            assert os.read(reading, 1) == b""  # end of file: nobody else holds it
            assert query(postgres.url(), "SELECT 1") == 1
        os.close(reading)


class TestKeptData:
    def test_data_and_password_survive(self, data_dir):
        postgres = EmbeddedPostgres(data_dir=data_dir)
        with postgres:
            password = make_url(postgres.url()).password
            query(postgres.url(), "CREATE TABLE kept AS SELECT 7 AS id")
            assert query(postgres.url(), "SHOW fsync") == "on"
            assert query(postgres.url(), "SHOW data_directory") == str(data_dir / "data")
        assert (data_dir / "password").stat().st_mode & 0o777 == 0o600
        with EmbeddedPostgres(data_dir=data_dir) as again:
            assert make_url(again.url()).password == password
            assert query(again.url(), "SELECT id FROM kept") == 7

    def test_it_survives_the_sigkill_of_its_owner(self, data_dir, public_dir):
        code = f"""
from pathlib import Path
kept = EmbeddedPostgres(data_dir=Path({str(data_dir)!r})).start()
print(kept.pid, kept.url(driver=""), flush=True)
time.sleep(600)
"""
        with owner_process(public_dir, code) as (owner, facts):
            pid, url = owner.stdout.readline().split()
            query(url, "CREATE TABLE kept AS SELECT 7 AS id")
            owner.kill()
            wait_until(lambda: not runs(int(pid)) and not runs(facts["server"]), "both servers end")
        with EmbeddedPostgres(data_dir=data_dir) as again:
            assert query(again.url(), "SELECT id FROM kept") == 7

    def test_a_new_directory_below_an_old_one(self, data_dir):
        data_dir.chmod(0o755)
        with EmbeddedPostgres(data_dir=data_dir / "new" / "er") as postgres:
            assert query(postgres.url(), "SELECT 1") == 1

    def test_one_cut_short_is_made_anew(self, data_dir):
        (data_dir / "data.partial").mkdir()
        (data_dir / "data.partial" / "PG_VERSION").touch()
        (data_dir / "password").touch()
        with EmbeddedPostgres(data_dir=data_dir) as postgres:
            assert query(postgres.url(), "SELECT 1") == 1

    def test_a_directory_of_somebody_else_is_left_alone(self, data_dir):
        (data_dir / "thesis.txt").write_text("all of it")
        owner = data_dir.stat().st_uid
        with pytest.raises(EmbeddedPostgresError, match="not made here"):
            EmbeddedPostgres(data_dir=data_dir).start()
        assert list(data_dir.iterdir()) == [data_dir / "thesis.txt"]
        assert data_dir.stat().st_uid == owner

    def test_a_second_server_on_the_same_data_is_refused(self, data_dir):
        with EmbeddedPostgres(data_dir=data_dir) as postgres:
            with pytest.raises(EmbeddedPostgresError, match=r"(?s)did not start.*postmaster\.pid"):
                EmbeddedPostgres(data_dir=data_dir).start()
            assert query(postgres.url(), "SELECT 1") == 1

    @needs_root
    def test_one_out_of_reach_is_told(self, tmp_path):
        with pytest.raises(EmbeddedPostgresError, match=f"nobody, who must be able to reach {tmp_path}"):
            EmbeddedPostgres(data_dir=tmp_path / "data").start()
        assert tmp_path.stat().st_mode & 0o777 == 0o700


class TestBinaries:
    def test_they_are_postgres_and_initdb(self):
        assert subprocess.run([find_bindir() / "postgres", "-V"], capture_output=True, check=True).stdout.startswith(
            b"postgres"
        )

    def test_the_environment_decides(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SQLA_JOBQUEUE_PG_BINDIR", str(tmp_path))
        with pytest.raises(
            EmbeddedPostgresError, match=re.escape(f"{tmp_path} is no directory of PostgreSQL binaries")
        ):
            EmbeddedPostgres().start()
        for program in ("postgres", "initdb"):
            (tmp_path / program).touch()
        assert find_bindir() == tmp_path

    def test_a_given_directory_is_checked(self, tmp_path):
        with pytest.raises(EmbeddedPostgresError, match="is no directory of PostgreSQL binaries"):
            EmbeddedPostgres(bindir=tmp_path).start()

    def test_without_the_wheel_the_path_serves(self, monkeypatch, tmp_path):
        programs = find_bindir()
        monkeypatch.delenv("SQLA_JOBQUEUE_PG_BINDIR", raising=False)
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        (tmp_path / "postgres").symlink_to(programs / "postgres")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_bindir() == programs.resolve()

    def test_where_there_are_none_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr("sqla_jobqueue.embedded._candidates", lambda: iter([Path("/nowhere")]))
        monkeypatch.delenv("SQLA_JOBQUEUE_PG_BINDIR", raising=False)
        with pytest.raises(EmbeddedPostgresError, match=re.escape("pip install 'sqla-jobqueue[embedded]'")):
            EmbeddedPostgres().start()

    @needs_root
    @pytest.mark.parametrize("hide", ["parent", "files"])
    def test_out_of_reach_of_nobody_they_are_copied(self, tmp_path, hide):
        """As in a checkout under a private home, and as installed under umask 077."""
        bindir = copy_install(find_bindir(), tmp_path / "site")
        if hide == "files":
            subprocess.run(["chmod", "-R", "go-rwx", tmp_path / "site"], check=True)
        assert tmp_path.stat().st_mode & 0o077 == 0
        with EmbeddedPostgres(bindir=bindir) as postgres:
            base = Path(postgres._facts["base"])
            assert base in Path(f"/proc/{postgres.pid}/exe").readlink().parents
            assert query(postgres.url(), "SELECT 1") == 1
        assert not base.exists()


@pytest.mark.skipif(not IS_ROOT, reason="the whole suite runs as an ordinary user already")
class TestUsers:
    def test_under_root_the_server_is_nobody(self, postgres):
        nobody = pwd.getpwnam("nobody")
        assert Path(f"/proc/{postgres.pid}").stat().st_uid == nobody.pw_uid
        status = Path(f"/proc/{postgres.pid}/status").read_text()
        assert re.search(rf"^Gid:\t{nobody.pw_gid}\b", status, re.MULTILINE)
        assert re.search(r"^Groups:\t\s*$", status, re.MULTILINE)

    def test_the_owner_of_kept_data_runs_its_server(self, data_dir):
        daemon = pwd.getpwnam("daemon")
        os.chown(data_dir, daemon.pw_uid, daemon.pw_gid)
        with EmbeddedPostgres(data_dir=data_dir) as postgres:
            assert Path(f"/proc/{postgres.pid}").stat().st_uid == daemon.pw_uid

    def test_an_ordinary_user_starts_it(self, public_dir):
        """The package alone, copied to where anybody may read, is enough: it needs the standard library only."""
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        pythons = [sys.executable, *map(str, sorted(Path("/usr/bin").glob("python3.1?"), reverse=True))]
        python = next((python for python in pythons if can_run(python, user)), None)
        if python is None:
            pytest.skip("the user nobody reaches no Python of 3.11 or later")
        bindir = find_bindir()
        if not can_run(str(bindir / "postgres"), user, "-V"):
            bindir = copy_install(bindir, public_dir / "site")
        env = {"SQLA_JOBQUEUE_PG_BINDIR": str(bindir), "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
        with owner_process(public_dir, "sys.stdin.read(); postgres.stop()", python=python, env=env, **user) as (
            owner,
            facts,
        ):
            assert facts["uid"] == nobody.pw_uid
            assert query(facts["url"], "SELECT 1") == 1
            assert Path(f"/proc/{facts['server']}").stat().st_uid == nobody.pw_uid
            owner.stdin.close()
            assert owner.wait(20) == 0
            assert not Path(facts["base"]).exists()


def can_run(program: str, user: dict, *arguments: str) -> bool:
    arguments = arguments or ("-c", "import sys, ctypes; sys.exit(sys.version_info < (3, 11))")
    with contextlib.suppress(OSError):
        return subprocess.run([program, *arguments], cwd="/", capture_output=True, check=False, **user).returncode == 0
    return False


class TestCommandLine:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_it_serves_until_it_is_told_to_stop(self, data_dir, number):
        command = [sys.executable, "-m", "sqla_jobqueue.embedded", "--data-dir", str(data_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                url = process.stdout.readline().strip()
                assert query(url, "SELECT 1") == 1
                pid = int((data_dir / "data" / "postmaster.pid").read_text().split()[0])
                process.send_signal(number)
                assert process.wait(20) == 0
                assert process.stderr.read() == ""
            finally:
                process.kill()
        assert not runs(pid)
        assert (data_dir / "data" / "PG_VERSION").exists()
