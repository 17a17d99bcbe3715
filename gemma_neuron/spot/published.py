"""Whether what boxes are to install is there, asked before a box is bought that would find out."""

from __future__ import annotations

from collections.abc import Callable

from gemma_neuron.errors import UsageError
from gemma_neuron.spot.user_data import PINNED

INDEX = "https://pypi.org/pypi"
"""Where a box's pip looks for a release. One document a release, 404 without (docs.pypi.org/api/json)."""
SECONDS = 10.0


def require_published(toolkit: str, say: Callable[[str], None]) -> None:
    """Raises UsageError for a release that the public index does not have. An index that cannot be asked from here is
    said and no more: boxes may reach it. Wheels and commits carry their digest; a box that cannot have them ends."""
    import httpx2

    if PINNED.fullmatch(toolkit) is None:
        return
    name, _, version = toolkit.partition("==")
    try:
        answer = httpx2.get(
            f"{INDEX}/{name}/{version}/json", timeout=SECONDS, follow_redirects=True
        )
    except httpx2.HTTPError as error:
        say(f"{INDEX} could not be asked whether it has {toolkit}: {error}.")
        return
    if answer.status_code == 404:
        raise UsageError(
            f"Boxes are to install {toolkit}, and the public index has no such release.",
            "Name a wheel or a commit: --toolkit https://….whl#sha256=… or git+https://…@<40 hex digits>.",
        )
    if not answer.is_success:
        say(f"{INDEX} answered {answer.status_code} when asked whether it has {toolkit}.")
