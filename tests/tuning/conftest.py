"""One tiny model, one data file, one undisturbed run of them, for all tests of `tune`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import write_tiny_gemma4
from tests.tuning.job import Job, write_data


@pytest.fixture(scope="session")
def tune_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(scope="session")
def tune_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture
def job(tune_model: Path, tune_data: Path, tmp_path: Path) -> Job:
    return Job(tune_model, tune_data, tmp_path / "adapter")


@pytest.fixture(scope="session")
def undisturbed(tune_model: Path, tune_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One replica, nobody disturbs it."""
    job = Job(tune_model, tune_data, tmp_path_factory.mktemp("undisturbed") / "adapter")
    job.run(replicas=1)
    return job
