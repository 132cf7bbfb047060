"""A directory whose chunks outlive the daemon: who may have it, and when."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from registrations import largest

from tierd.memory.persist import PersistDirectory, used_bytes
from tierd.wire.errors import ConfigError, ProtocolError
from tierd.wire.geometry import namespace_digest, namespace_record, read_namespace_record
from tierd.wire.messages import BufferSpec, PoolSpec

CHUNK = 1 << 20
PATIENCE_S = 120.0


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory."""
    directory = Path(tempfile.mkdtemp(prefix="tierd-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def test_it_is_made_for_its_user_alone_and_so_are_its_files(memory: Path) -> None:
    directory = PersistDirectory(memory / "new" / "pages")
    assert directory.take_over(1.0)
    file = directory.create(1, CHUNK)
    directory.describe(bytes(32), b"what it is")
    os.close(file.fd)
    assert (memory / "new" / "pages").stat().st_mode & 0o777 == 0o700
    files = list((memory / "new" / "pages").iterdir())
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    directory.close()


def test_what_was_left_is_found_again_and_what_was_discarded_is_not(memory: Path) -> None:
    directory = PersistDirectory(memory / "pages")
    kept, gone = directory.create(1, CHUNK), directory.create(2, 2 * CHUNK)
    os.pwrite(kept.fd, b"kept", 0)
    os.close(gone.fd)
    directory.discard(2)
    os.close(kept.fd)
    directory.close()
    again = PersistDirectory(memory / "pages")
    (found,) = again.found()
    assert found.size == CHUNK
    assert os.pread(found.fd, 4, 0) == b"kept"
    assert used_bytes(memory / "pages") == os.fstat(found.fd).st_blocks * 512 > 0
    again.reject(found)
    assert again.found() == []
    assert used_bytes(memory / "pages") == 0
    again.close()


def test_files_that_are_not_ours_are_left_alone(memory: Path) -> None:
    path = memory / "pages"
    directory = PersistDirectory(path)
    (path / "notes.txt").write_text("mine")
    (path / "0123456789abcdef.chunk").symlink_to("/etc/passwd")
    (path / "0123456789abcde0.chunk").mkdir()
    os.mkfifo(path / "0123456789abcde1.chunk")
    assert directory.found() == []
    assert (path / "notes.txt").exists()
    directory.close()


def test_a_record_comes_back_as_it_was_and_a_damaged_one_is_refused(memory: Path) -> None:
    pool = PoolSpec(
        name="kv",
        num_pages=8,
        page_tokens=16,
        buffers=[BufferSpec(allocation=0, offset=0, page_stride=64, row_bytes=64, layer=0)],
    )
    digest = namespace_digest({"model": "m"}, 2, [pool], "")
    record = namespace_record({"model": "m"}, 2, [pool], "")
    directory = PersistDirectory(memory / "pages")
    directory.describe(digest, record)
    data = directory.record(digest)
    assert data == record
    read = read_namespace_record(data, digest)
    assert (read.world_size, read.epoch, read.namespace) == (2, "", [("model", "m")])
    assert read.pools == [("kv", (16, 0, [(64, 0)], False))]
    with pytest.raises(ProtocolError, match="has changed"):
        read_namespace_record(data[:-1], digest)
    assert directory.record(bytes(32)) is None
    directory.forget_others([])
    assert directory.record(digest) is None
    directory.close()


def test_the_largest_record_comes_back_too(memory: Path) -> None:
    rank = largest()
    facts = (rank.namespace, rank.world_size, rank.pools, "")
    digest, record = namespace_digest(*facts), namespace_record(*facts)
    directory = PersistDirectory(memory / "pages")
    directory.describe(digest, record)
    written = next((memory / "pages").glob("*.namespace")).stat().st_ino
    assert directory.record(digest) == record
    directory.describe(digest, record)
    assert next((memory / "pages").glob("*.namespace")).stat().st_ino == written, "it is there"
    directory.close()


@pytest.mark.parametrize("length", [b"\xff" * 8, (1 << 21).to_bytes(8, "little"), b""])
def test_a_record_of_any_length_is_read_within_bounds(memory: Path, length: bytes) -> None:
    directory = PersistDirectory(memory / "pages")
    directory.describe(bytes(32), b"a record")
    (file,) = (memory / "pages").glob("*.namespace")
    if length:
        with file.open("r+b") as raw:
            raw.write(length)
    else:
        os.truncate(file, 3)
    data = directory.record(bytes(32))
    assert data is None or len(data) <= file.stat().st_size
    directory.close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_one_that_others_can_enter_is_refused(memory: Path, mode: int) -> None:
    path = memory / "pages"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 700"):
        PersistDirectory(path)


def test_one_of_another_user_is_refused(memory: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    path = memory / "pages"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="another user"):
        PersistDirectory(path)


def test_a_link_is_not_followed(memory: Path) -> None:
    (memory / "real").mkdir(mode=0o700)
    (memory / "link").symlink_to(memory / "real")
    with pytest.raises(ConfigError, match="cannot be opened"):
        PersistDirectory(memory / "link")


def test_one_on_a_disk_is_refused(tmp_path: Path, memory: Path) -> None:
    if os.statvfs(tmp_path).f_fsid == os.statvfs(memory).f_fsid:
        pytest.skip("tests run in memory here")
    with pytest.raises(ConfigError, match="lies on a disk"):
        PersistDirectory(tmp_path / "pages")


def test_more_than_the_file_system_has_is_refused(memory: Path) -> None:
    directory = PersistDirectory(memory / "pages")
    directory.check_space(CHUNK)
    with pytest.raises(ConfigError, match="mount it with a larger `size=`"):
        directory.check_space(1 << 60)
    directory.close()


def test_one_daemon_has_it_at_a_time(memory: Path) -> None:
    first = PersistDirectory(memory / "pages")
    with pytest.raises(ConfigError, match="another daemon"):
        PersistDirectory(memory / "pages")
    first.close()
    PersistDirectory(memory / "pages").close()


HOLDER = """
import signal, sys, time
{before}
print("ready", flush=True)
{then}
"""


def holder(directory: PersistDirectory, *, before: str = "", then: str) -> subprocess.Popen[str]:
    """A process that holds the copiers' lock as a copier does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(before=before, then=then)],
        pass_fds=[directory.copiers_lock],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        return process.wait(PATIENCE_S)


def test_a_copier_that_ends_by_itself_is_waited_for(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = PersistDirectory(memory / "pages")
    assert first.take_over(1.0)
    copier = holder(first, then="input()")
    first.close()
    second = PersistDirectory(memory / "pages")

    def end_when_it_is_waited_for() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while "waiting" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        print(file=copier.stdin, flush=True)

    ending = threading.Thread(target=end_when_it_is_waited_for)
    ending.start()
    assert second.take_over(PATIENCE_S)
    ending.join()
    assert ended(copier) == 0, "it was not killed"
    assert re.search(rf"waiting up to {PATIENCE_S:.0f} s .*pids {copier.pid}", caplog.text)
    second.close()


def test_one_that_does_not_end_is_killed(memory: Path) -> None:
    first = PersistDirectory(memory / "pages")
    assert first.take_over(1.0)
    copier = holder(first, then="sys.stdin.read()")
    os.kill(copier.pid, signal.SIGSTOP)
    number = first.create(1, CHUNK)
    first.close()
    second = PersistDirectory(memory / "pages")
    assert second.take_over(0.2)
    assert ended(copier) == -signal.SIGKILL
    assert len(second.found()) == 1
    os.close(number.fd)
    second.close()


def test_chunks_of_one_that_cannot_be_ended_are_not_used(memory: Path) -> None:
    first = PersistDirectory(memory / "pages")
    assert first.take_over(1.0)
    file = first.create(1, CHUNK)
    first.describe(bytes(32), b"what it is")
    held = os.dup(first.copiers_lock)  # by us: nobody kills himself
    first.close()
    second = PersistDirectory(memory / "pages")
    assert not second.take_over(0.1, death_s=0.1)
    assert second.found() == []
    assert second.record(bytes(32)) is None
    # And what comes after that is as usual, whether the old one has ended by then or not.
    second.close()
    third = PersistDirectory(memory / "pages")
    assert third.take_over(0.1)
    third.close()
    os.close(held)
    os.close(file.fd)
