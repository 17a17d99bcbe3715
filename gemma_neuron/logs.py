"""What modules log goes to stderr, as all progress does: also from workers, whose stderr may be a file."""

from __future__ import annotations

import logging

NAME = "gemma_neuron"


def to_stderr() -> None:
    """Show this package's records from INFO on in this process, a line each. A second call does nothing."""
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
