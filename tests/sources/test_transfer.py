"""Downloads in parts: what counts after a death, and what a failure leaves."""

from __future__ import annotations

import errno
import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemma_neuron.errors import DiskFullError
from gemma_neuron.transfer import Transfer, disk_errors, require_room

DATA = bytes(range(256)) * 40
PART = 1000


class Server:
    """Yields ranges of DATA and keeps account of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.errors: list[Exception] = []

    def fetch(self, offset: int, count: int) -> Iterator[bytes]:
        self.asked.append((offset, count))
        if self.errors:
            raise self.errors.pop()
        for start in range(offset, offset + count, 300):
            yield DATA[start : min(start + 300, offset + count)]


def transfer(folder: Path, size: int = len(DATA)) -> Transfer:
    return Transfer(
        size=size, partial=folder / "file.partial", new_hash=hashlib.md5, part_bytes=PART
    )


def run(server: Server, what: Transfer) -> tuple[list[str], int]:
    """Digests of the parts and the bytes that progress was told of."""
    counted: list[int] = []
    digests = what.run(
        server.fetch, lambda error: isinstance(error, ConnectionError), counted.append
    )
    return digests, sum(counted)


def test_whole_in_parts(tmp_path: Path) -> None:
    server, what = Server(), transfer(tmp_path)
    assert what.missing_bytes() == len(DATA)
    digests, counted = run(server, what)
    assert digests == [
        hashlib.md5(DATA[i : i + PART]).hexdigest() for i in range(0, len(DATA), PART)
    ]
    assert (counted, what.missing_bytes(), len(server.asked)) == (len(DATA), 0, 11)
    what.finish(tmp_path / "done" / "file")
    assert (tmp_path / "done" / "file").read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_a_failed_run_keeps_its_finished_parts(tmp_path: Path) -> None:
    server, what = Server(), transfer(tmp_path)
    server.errors = [ValueError("no use in trying again")]
    with pytest.raises(ValueError, match="no use"):
        run(server, what)
    kept = len(DATA) - what.missing_bytes()
    server.asked.clear()
    run(server, transfer(tmp_path))
    assert sum(count for _, count in server.asked) == len(DATA) - kept
    assert what.partial.read_bytes() == DATA


def test_a_part_whose_bytes_changed_is_fetched_again(tmp_path: Path) -> None:
    server, what = Server(), transfer(tmp_path)
    run(server, what)
    spoiled = bytearray(DATA)
    spoiled[2500] ^= 1
    what.partial.write_bytes(spoiled)
    log = tmp_path / "file.partial.parts"
    log.write_text(log.read_text() + "7 torn")  # a line cut by a crash
    server.asked.clear()
    run(server, what)
    assert server.asked == [(2000, PART)]
    assert what.partial.read_bytes() == DATA


def test_another_file_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    run(Server(), transfer(tmp_path, size=5000))
    server, what = Server(), transfer(tmp_path)
    assert what.missing_bytes() == len(DATA)
    run(server, what)
    assert len(server.asked) == 11 and what.partial.read_bytes() == DATA


def test_errors_that_pass_are_tried_again(tmp_path: Path) -> None:
    server, what = Server(), transfer(tmp_path, size=500)
    server.errors = [ConnectionError(), ConnectionError()]
    _, counted = run(server, what)
    assert (counted, len(server.asked)) == (500, 3)


def test_an_empty_file(tmp_path: Path) -> None:
    server, what = Server(), transfer(tmp_path, size=0)
    assert run(server, what) == ([hashlib.md5(b"").hexdigest()], 0)
    assert server.asked == [] and what.partial.read_bytes() == b""


def test_disk_errors_carry_numbers(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=r"needs 1,000,000,000,000,000 more bytes") as caught:
        require_room(tmp_path / "not" / "there", 10**15, "Fetching x")
    assert caught.value.exit_code == 8
    with pytest.raises(DiskFullError, match=r"bytes are free"), disk_errors(tmp_path, "Fetching x"):
        raise OSError(errno.ENOSPC, "No space left on device")


class Hanging(Server):
    """Does not answer for any part but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def fetch(self, offset: int, count: int) -> Iterator[bytes]:
        if offset:
            self.over.wait(30)
        yield from super().fetch(offset, count)


@pytest.mark.parametrize("how", ["signal", "error"])
def test_nobody_waits_for_a_server_that_does_not_answer(tmp_path: Path, how: str) -> None:
    """Ctrl-C, or another part that failed for good. What comes back late is not written any more."""
    server, what = Hanging(), transfer(tmp_path)
    if how == "error":
        server.errors.append(ValueError("for good"))
    else:
        threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(ValueError if how == "error" else KeyboardInterrupt):
        run(server, what)
    assert time.monotonic() - started < 5
    log = tmp_path / "file.partial.parts"
    before = log.read_text(), what.partial.read_bytes()
    server.over.set()
    late = [thread for thread in threading.enumerate() if thread.name == "transfer"]
    for thread in late:
        thread.join(10)
    assert late and (log.read_text(), what.partial.read_bytes()) == before


def test_after_a_signal_nothing_is_tried_again(tmp_path: Path) -> None:
    server, what = Server(), transfer(tmp_path)
    server.errors = [ConnectionError()] * 1000
    threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run(server, what)
    for thread in threading.enumerate():
        if thread.name == "transfer":
            thread.join(10)
    asked = len(server.asked)
    time.sleep(0.5)
    assert len(server.asked) == asked <= 8 * 4, "of six tries of each part"


def test_nobody_waits_for_a_terminal_that_takes_no_line(tmp_path: Path) -> None:
    over, what = threading.Event(), transfer(tmp_path)

    def stuck(count: int) -> None:
        over.wait(10)

    threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        what.run(Server().fetch, lambda _: True, stuck)
    assert time.monotonic() - started < 5
    over.set()
