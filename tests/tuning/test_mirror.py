"""A run whose machine is taken away goes on elsewhere, from a real S3 on loopback."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemma_neuron.elastic.faults import PreemptionNotice
from gemma_neuron.elastic.metadata import DISABLED, ENDPOINT
from gemma_neuron.elastic.notice import POLL_SECONDS
from gemma_neuron.errors import Interrupted, NotMirroredError, PortMismatchError
from gemma_neuron.mirror.background import MirrorOptions
from gemma_neuron.tuning.plan import Progress
from tests.elastic.imds_stand_in import Metadata
from tests.sources.s3_servers import KEYS, boto, moto
from tests.tuning.job import Job

NOTICE = 120.0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto() as address:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": address}.items():
            monkeypatch.setenv(name, value)
        boto(address).create_bucket(Bucket="runs")
        yield address


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    made = Metadata()
    monkeypatch.setenv(ENDPOINT, made.url)
    monkeypatch.delenv(DISABLED, raising=False)
    yield made
    made.close()


def test_a_spot_notice_mirrors_and_an_empty_folder_elsewhere_goes_on(
    job: Job, undisturbed: Job, store: str, metadata: Metadata, tmp_path: Path
) -> None:
    mirror = MirrorOptions(uri="s3://runs/tuned")
    posted: list[float] = []

    def look(where: Progress) -> None:
        if where.step == 6:
            metadata.take_away(NOTICE)
            posted.append(time.monotonic())
            time.sleep(POLL_SECONDS + 0.5)

    with pytest.raises(PreemptionNotice) as ended:
        job.run(look, mirror=mirror)
    assert ended.value.exit_code == 75 and time.monotonic() - posted[0] < NOTICE / 2
    assert [e["step"] for e in job.events("committed")] == [4, 6]
    assert [e["step"] for e in job.events("mirrored")][-1] == 6
    metadata.texts.clear()

    # the newest in the bucket is altered: it is named, and the one before it taken
    client = boto(store)
    keys = [found["Key"] for found in client.list_objects_v2(Bucket="runs")["Contents"]]
    blobs = [key for key in keys if "/step-00000006/" in key and "checkpoint." not in key]
    size = client.head_object(Bucket="runs", Key=blobs[0])["ContentLength"]
    client.put_object(Bucket="runs", Key=blobs[0], Body=os.urandom(size))
    elsewhere = Job(job.model, job.asked.data, tmp_path / "elsewhere")
    elsewhere.run(replicas=1, mirror=mirror)
    assert elsewhere.adapter == undisturbed.adapter
    assert any("step 6 is refused" in line and "blake3" in line for line in elsewhere.told)
    assert elsewhere.events("restored")[0]["step"] == 4

    keys = [found["Key"] for found in client.list_objects_v2(Bucket="runs")["Contents"]]
    markers = sorted(key.split("/")[-2] for key in keys if key.endswith(".committed"))
    assert markers[-1] == "step-00000014" and len(markers) <= 3, "kept three deep"
    assert "step-00000006" not in markers, "what was refused is not offered again"
    folders = {key.split("/")[-2] for key in keys if "/step-" in key}
    assert folders == set(markers), "nothing is left of those that were dropped"


def test_a_store_that_is_away_stops_nothing_and_is_said_at_the_end(
    job: Job, undisturbed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(NotMirroredError, match="cannot be reached"):
        job.run(replicas=1, mirror=MirrorOptions(uri="s3://runs/tuned"))
    assert job.adapter == undisturbed.adapter


def test_a_run_of_a_model_that_had_to_be_fetched_first_goes_on_now_that_it_is_here(
    job: Job, undisturbed: Job, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What names its base is not known before: the run was another one the second time."""
    monkeypatch.setenv("GEMMA_NEURON_CACHE", str(tmp_path / "cache"))
    for path in job.model.iterdir():
        boto(store).upload_file(str(path), "runs", f"model/{path.name}")
    job.source = "s3://runs/model"

    def stop(where: Progress) -> None:
        if where.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        job.run(stop)
    job.run(replicas=1)
    assert [e["step"] for e in job.events("restored")] == [0, 6]
    assert job.adapter == undisturbed.adapter
    runs = {e["run"] for e in job.events("started") + undisturbed.events("started")}
    assert len(runs) == 1, "a fetched model is the model"
    with pytest.raises(PortMismatchError, match="its rank is 8, asked for is 4"):
        job.run(rank=4)
