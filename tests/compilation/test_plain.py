"""Folders of any name are given to the compilers by one that their command lines can hold."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from gemma_neuron.backends.plain import is_plain, plainly_named


@pytest.mark.parametrize(
    "name", ["my port", "it's", 'a "b"', "back\\slash", "$HOME", "Größe", "tab\there"]
)
def test_an_odd_folder_gets_a_plain_name_that_goes_again(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with plainly_named(folder) as named:
        assert is_plain(named) and named != str(folder)
        (Path(named) / "file").write_text("there")
        assert (folder / "file").read_text() == "there"
    assert not Path(named).exists() and not Path(named).parent.exists()
    assert (folder / "file").exists()


def test_a_plain_folder_keeps_its_name(tmp_path: Path) -> None:
    with plainly_named(tmp_path) as named:
        assert named == str(tmp_path)


def test_temporary_files_of_an_odd_name_are_not_where_the_link_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "my tmp"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with plainly_named(odd) as named:
        assert is_plain(named) and Path(named).resolve() == odd.resolve()
