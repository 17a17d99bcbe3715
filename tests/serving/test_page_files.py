"""The page's files and `/status`, as a client without a browser sees them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx2
import pytest

from gemma_neuron.backends.base import CompileSpec
from gemma_neuron.serving.access import AccessRules
from gemma_neuron.serving.page import page_files
from tests.serving.server import RunningServer, running, write_port

ROOT = Path(__file__).parents[2]
VENDORED = (ROOT / "gemma_neuron" / "data" / "page" / "vendor", ROOT / "tests" / "data" / "axe")


@pytest.mark.parametrize("folder", VENDORED, ids=lambda path: path.name)
def test_vendored_files_are_the_releases_that_versions_json_names(folder: Path) -> None:
    """Run scripts/vendor-page after a change of versions; nothing here is edited by hand."""
    packages = json.loads((folder / "versions.json").read_text())["packages"]
    listed = {name: digest for one in packages for name, digest in one["files"].items()}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "versions.json"
    }
    assert found == listed
    script = (ROOT / "scripts" / "vendor_page.py").read_text()
    for one in packages:
        assert f'name="{one["name"]}",\n        version="{one["version"]}"' in script
        assert len((folder / f"{one['name']}.LICENSE.txt").read_text()) > 1000
        for name in one["bundled"]:
            assert f"{name} (" in (folder / f"{one['name']}.LICENSE.txt").read_text()


def test_files_come_from_the_package_under_a_strict_policy(free: RunningServer) -> None:
    with httpx2.Client(base_url=free.url) as client:
        for path in ("/", *(f"/page/{name}" for name in page_files())):
            answer = client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        html = client.get("/").text
    assert "<style" not in html and "style=" not in html and " onclick" not in html
    assert html.count("<script") == html.count("<script src=")


@pytest.mark.parametrize(
    "path",
    ["base.html.jinja", "nothing.js", "../instances.json", "%2e%2e/instances.json", "vendor"],
)
def test_nothing_else_of_the_package_is_served(free: RunningServer, path: str) -> None:
    assert httpx2.get(f"{free.url}/page/{path}").status_code == 404


def test_the_page_needs_no_key_and_what_it_shows_does(folder: Path) -> None:
    with running(folder, rules=AccessRules(api_key="secret")) as server:
        for path in ("/", "/page/app.js"):
            assert httpx2.get(server.url + path).status_code == 200
            foreign = httpx2.get(server.url + path, headers={"host": "evil.example"})
            assert foreign.status_code == 403
        for path in ("/status", "/pages", "/page", "//"):
            assert httpx2.get(server.url + path).status_code == 401


def test_status_tells_port_verdict_versions_replicas_and_events(tmp_path: Path) -> None:
    port = write_port(tmp_path)
    spec = CompileSpec(backend="cpu", dtype="bfloat16", slots=4, max_context=256, buckets=(16, 32))
    port.write_record(port.record.model_copy(update={"compile": spec}))
    (tmp_path / "plan.json").write_text('{"tp": 8, "strategy": "replicate-kv", "layers": []}')
    level = {"level": 3, "name": "logits", "status": "pass", "reason": "0.01 nats", "detail": {}}
    report = {
        "verdict": "works", "scope": "chat", "levels": [level], "warnings": ["careful"],
        "provenance": {"port_digest": port.record.digest},
    }  # fmt: skip
    (tmp_path / "validation.json").write_text(json.dumps(report))
    for number in range(60):
        port.append("events.jsonl", {"event": "worker_died", "rank": number})
    with running(port.source_folder, port=port) as server:
        found = httpx2.get(f"{server.url}/status").json()
    assert found["schema"] == 1
    assert found["model"]["id"] == "tiny" and found["model"]["verdict"] == "works"
    assert found["model"]["max_context"] == 256 and found["model"]["thinking"] is True
    assert found["port"]["digest"] == port.record.digest
    assert found["port"]["source"]["uri"] == "/models/tiny-it"
    shape = found["port"]["shape"]
    assert shape["tp"] == 8 and shape["backend"] == "cpu" and shape["buckets"] == [16, 32]
    shown = {name: value for name, value in level.items() if name != "detail"}
    assert found["port"]["validation"]["levels"] == [shown]
    assert found["port"]["validation"]["warnings"] == ["careful"]
    assert (found["phase"], found["queue"], found["replicas"][0]["slots"]) == ("ready", 0, 4)
    assert set(found["versions"]) >= {"gemma-neuron", "torch", "python"}
    assert [event["rank"] for event in found["events"]] == list(range(59, 9, -1))


def test_status_stands_whatever_the_ports_files_hold(tmp_path: Path) -> None:
    port = write_port(tmp_path)
    events = '{"event": "x", "seconds": NaN, "why": "\\ud800", "deep": [1]}\nno json\n["list"]\n{"torn": '
    (tmp_path / "events.jsonl").write_text("{}\n" + f'{{"big": "{"x" * 200_000}"}}\n' + events)
    report = {"verdict": "works", "levels": [7, {"level": 1}], "warnings": None}
    provenance = {"provenance": {"port_digest": port.record.digest}}
    (tmp_path / "validation.json").write_text(json.dumps(report | provenance))
    with running(port.source_folder, port=port) as server:
        answer = httpx2.get(f"{server.url}/status")
    assert answer.status_code == 200
    assert answer.json()["events"] == [{"event": "x", "seconds": "nan", "why": "?", "deep": "[1]"}]
    (kept,) = answer.json()["port"]["validation"]["levels"]
    assert kept == {"level": 1, "name": None, "status": None, "reason": None}


def test_status_without_a_port_and_before_the_model_is_loaded(folder: Path) -> None:
    with running(folder, load=False, validated=False, verdict=None) as server:
        found = httpx2.get(f"{server.url}/status").json()
    assert (found["phase"], found["port"], found["events"]) == ("starting", None, [])
    assert found["model"]["validated"] is False and found["model"]["max_context"] is None
