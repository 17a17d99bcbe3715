"""Compiles that lose their machine and go on from the bucket: the cases `story` and `restart` of soak_mirror.py."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemma_neuron.port import Port
from tests.pipeline.test_mirrored_compile import arguments
from tests.sources.bad_proxy import bad_proxy
from tests.sources.processes import Commands
from tests.sources.rclone_server import RcloneServer, rclone

BUCKET = "soak"
UNITS = 3
MOST_LIVES = 6
FIRST_SECONDS, WHOLE_SECONDS = 3.0, 40.0
"""A notice comes at any moment from the first on, up to what a whole compile takes: so long, until one was seen."""
UP_SECONDS, DOWN_SECONDS = (4.0, 15.0), (0.5, 5.0)
"""How long the store answers between two of its deaths, and how long it is away."""
LIFE_SECONDS = 900


_whole = [WHOLE_SECONDS]


def story(
    source: Path, folder: Path, store: str, commands: Commands, case: str, share: float
) -> dict[str, Any]:
    """Behind a proxy before `store` that does what bad networks do to `share` of the requests."""
    with bad_proxy(store, share, case) as proxy:
        lived = live(source, folder, commands.having(AWS_ENDPOINT_URL_S3=proxy.address), case)
        fields = {"requests": proxy.requests, "faults": dict(proxy.met)}
    return fields | judged(lived, commands)


def restart(source: Path, folder: Path, commands: Commands, case: str) -> dict[str, Any]:
    """A store on disk is killed and started again, over and over, in the middle of everything."""
    with tempfile.TemporaryDirectory() as disk, rclone(Path(disk), BUCKET) as server:
        commands = commands.having(AWS_ENDPOINT_URL_S3=server.address)
        with outages(server, random.Random(f"{case} outages")):
            lived = live(source, folder, commands, case)
        return {"restarts": server.starts - 1} | judged(lived, commands)


@contextmanager
def outages(server: RcloneServer, chance: random.Random) -> Iterator[None]:
    """Within it the server dies and comes back; at its end it runs."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(chance.uniform(*UP_SECONDS)):
            server.kill()
            time.sleep(chance.uniform(*DOWN_SECONDS))
            server.start()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def live(source: Path, folder: Path, commands: Commands, case: str) -> dict[str, Any]:
    """Life after life of one command, each in an empty folder, until one ends with 0; the first gets a notice."""
    uri = f"s3://{BUCKET}/{case.replace(' ', '-')}"
    notice = random.Random(case).uniform(FIRST_SECONDS, _whole[-1])
    built: list[str] = []
    lives: list[str] = []
    while True:
        out, started = folder / f"{case}-{len(lives)}", time.monotonic()
        process = commands.start(*arguments(source, out), "--mirror", uri)
        if not lives:
            time.sleep(notice)
            process.send_signal(signal.SIGTERM)
        try:
            _, said = process.communicate(timeout=LIFE_SECONDS)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        assert process.returncode in (0, 75) and "Traceback" not in said, said
        lines = Port(out).ledger() if (out / "port.json").is_file() else []
        now = [line["unit"] for line in lines if line["outcome"] == "built"]
        # the ledger travels: what this life built is what the last one's did not have
        lives.append(f"exit {process.returncode}, {len(now)} built: {_warned(said)}")
        if process.returncode == 0 and not built:
            _whole.append(time.monotonic() - started)
        built += now[len(built) :]
        if process.returncode == 0 or len(lives) == MOST_LIVES:
            return {
                "out": out,
                "uri": uri,
                "notice": round(notice, 1),
                "lives": lives,
                "built": built,
            }
        shutil.rmtree(out, ignore_errors=True)


def judged(lived: dict[str, Any], commands: Commands) -> dict[str, Any]:
    """One built line a unit over all lives, and a mirror that holds the port whole."""
    out, uri, built = lived.pop("out"), lived.pop("uri"), lived["built"]
    problems = []
    if not lived["lives"][-1].startswith("exit 0"):
        problems.append("never came to its end")
    if len(built) != UNITS or len(set(built)) != UNITS:
        problems.append(f"built {built}")
    if not problems:
        found = commands.run("mirror", "verify", out, uri)
        problems += [] if found.returncode == 0 else [f"verify: {found.stdout} {found.stderr}"]
    shutil.rmtree(out, ignore_errors=True)
    return lived | {"outcome": "; ".join(problems) or "ok"}


def _warned(said: str) -> str:
    """What a life complained of."""
    lines = [line for line in said.splitlines() if line.startswith(("warning:", "error:"))]
    return " | ".join(lines)[:600]
