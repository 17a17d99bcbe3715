"""From a hub id to one commit of a repository: by asking the hub, or from its cache when it cannot be asked.

In: `org/name[@revision]`. Out: `HubFolder` at a commit. A branch or tag is looked up each time; a snapshot that is
whole is enough when the network is down or switched off (HF_HUB_OFFLINE), and the user is told that it is.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import httpx2
from huggingface_hub import (
    ModelInfo,
    constants,
    get_cached_repo_tree,
    model_info,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HFValidationError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import (
    disable_progress_bars,
    get_session,
    logging,
    validate_repo_id,
)

from gemma_neuron.artifacts import write_atomic
from gemma_neuron.checkpoint.hub.folder import HubFolder, repository_folder
from gemma_neuron.checkpoint.hub.problems import Asked, hub_errors, worth_retrying
from gemma_neuron.checkpoint.remote import Tell, is_whole
from gemma_neuron.errors import NetworkError, SourceNotFoundError
from gemma_neuron.transfer import retrying

COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""git's SHA-1 of a small file, SHA-256 of one in LFS: what blobs are named by."""
REVISION = re.compile(r"(?!.*(\.\.|//))[\w][\w./-]*")
"""A part of git's own rule for names; it also keeps `refs/<revision>` of the cache inside the cache."""


def open_hub(text: str, tell: Tell) -> HubFolder:
    """The repository named by `text` at one commit.

    Raises SourceNotFoundError, AccessError or NetworkError.
    """
    repo, _, revision = text.partition("@")
    revision = revision or constants.DEFAULT_REVISION
    _check_names(text, repo, revision)
    disable_progress_bars()
    logging.set_verbosity_error()  # its warnings name signed links; what matters is told here
    cached = cached_folder(text, repo, revision)
    if cached is not None and cached.revision == revision and is_whole(cached):
        return cached  # a commit never changes
    whole = cached is not None and is_whole(cached)
    try:
        info = _ask(repo, revision, patient=not whole)
    except OfflineModeIsEnabled:
        if cached is None:
            raise NetworkError(
                f"{repo}@{revision} is not in the hub cache ({repository_folder(repo)}), and HF_HUB_OFFLINE "
                "forbids to fetch it.",
                "Unset HF_HUB_OFFLINE and run the same command once.",
            ) from None
        return cached
    except NetworkError as error:
        if cached is None or not whole:
            raise
        tell(
            f"warning: the hub cannot be reached ({type(error.__cause__).__name__}); {repo}@{revision} is "
            f"taken from its cache as it was last seen, at {cached.revision}"
        )
        return cached
    return _at_commit(text, repo, revision, info)


def cached_folder(text: str, repo: str, revision: str) -> HubFolder | None:
    """What the hub's cache has of a revision, judged without the network; None without a snapshot."""
    repository = repository_folder(repo)
    commit = revision
    if not COMMIT.fullmatch(revision):
        try:
            commit = (repository / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    snapshot = repository / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not snapshot.is_dir():
        return None
    try:
        sizes = {file.path: file.size for file in get_cached_repo_tree(repo, revision=commit)}
    except CachedRepoTreeNotFoundError:
        # Another tool fetched it; what the repository has besides is not known without the network.
        sizes = {path.name: path.stat().st_size for path in snapshot.iterdir() if path.is_file()}
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return HubFolder(text, repo, commit, sizes=sizes, offline=why)


def whole_snapshot(text: str, commit: str) -> Path | None:
    """The folder of a commit of `text` (a hub id) when all a port takes of it is in the cache, else None."""
    found = cached_folder(text, text.partition("@")[0], commit)
    return found.folder if found is not None and is_whole(found) else None


def _check_names(text: str, repo: str, revision: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise SourceNotFoundError(
            f"There is no folder {text}, and it is no hub id: {error}.",
            "Write org/name[@revision].",
        ) from error
    if not REVISION.fullmatch(revision):
        raise SourceNotFoundError(
            f"{text}: {revision!r} is no branch, tag or commit.", "Write org/name@revision."
        )


def _ask(repo: str, revision: str, *, patient: bool) -> ModelInfo:
    """The commit and the list of files; one try only where a whole snapshot is at hand."""
    info = None
    get_session().timeout = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    with hub_errors(Asked(repo, revision)):
        for attempt in retrying(lambda error: patient and worth_retrying(error)):
            with attempt:
                info = model_info(
                    repo,
                    revision=revision,
                    files_metadata=True,
                    timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                )
    assert info is not None
    return info


def _at_commit(text: str, repo: str, revision: str, info: ModelInfo) -> HubFolder:
    commit = info.sha or ""
    files = info.siblings or []
    if not COMMIT.fullmatch(commit) or any(file.size is None for file in files):
        raise NetworkError(
            f"{constants.ENDPOINT} answers for {repo} without a commit or without its files' sizes.",
            "Check HF_ENDPOINT; it must be a hub.",
        )
    if not COMMIT.fullmatch(revision):
        ref = repository_folder(repo) / "refs" / revision
        # As the hub's tools do, for a later run without the network; a cache mounted read-only is fine.
        with contextlib.suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(ref, commit.encode())
    digests = {f.rfilename: f.lfs.sha256 if f.lfs else f.blob_id for f in files}
    return HubFolder(
        text,
        repo,
        commit,
        sizes={file.rfilename: file.size or 0 for file in files},
        digests={n: d for n, d in digests.items() if d and DIGEST.fullmatch(d)},
    )
