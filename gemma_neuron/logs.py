"""What is said on stderr: a plain line, or with `--log-format json` one JSON object (time, level, logger, event).

Modules' log records and the notices of `render` come out alike, also from workers, whose stderr may be a file; these
learn the form from the environment.
"""

from __future__ import annotations

import logging
import os
from typing import Literal

NAME = "gemma_neuron"
VARIABLE = "GEMMA_NEURON_LOG_FORMAT"
LogFormat = Literal["text", "json"]


def choose(form: LogFormat) -> None:
    """For this process and those it starts."""
    os.environ[VARIABLE] = form
    to_stderr()


def as_json() -> bool:
    return os.environ.get(VARIABLE) == "json"


def to_stderr() -> None:
    """Show this package's records from INFO on in this process, a line each, in the form that is chosen."""
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    logger.handlers[0].setFormatter(_json_lines() if as_json() else None)


def say(level: int, line: str) -> None:
    """A line that no module logged: progress, a warning, a hint. `level`: as in `logging`."""
    logging.getLogger(NAME).log(level, "%s", line)


def _json_lines() -> logging.Formatter:
    from structlog import processors, stdlib

    return stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            stdlib.add_log_level,
            stdlib.add_logger_name,
            processors.TimeStamper(fmt="iso", utc=True, key="time"),
            stdlib.ExtraAdder(),
        ],
        processors=[
            stdlib.ProcessorFormatter.remove_processors_meta,
            processors.format_exc_info,
            processors.JSONRenderer(),
        ],
    )
