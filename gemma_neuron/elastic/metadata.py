"""EC2's instance metadata, version 2 only: a token by PUT, then reads. No proxy, short timeouts.

The endpoint and whether to ask at all come from botocore's environment variables.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from gemma_neuron.errors import SettingsError

DEFAULT_ENDPOINTS = {"ipv4": "http://169.254.169.254", "ipv6": "http://[fd00:ec2::254]"}
ENDPOINT, MODE, DISABLED = (
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
    "AWS_EC2_METADATA_DISABLED",
)
TIMEOUT_SECONDS = 1.0
"""Link-local: an answer takes a millisecond, or there is nobody."""
TOKEN_SECONDS = 21600
LONGEST_ANSWER = 65536
Failure = (OSError, http.client.HTTPException)


class InstanceMetadata:
    """Reads below /latest/meta-data. One caller at a time."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or not parts.hostname:
            raise SettingsError(
                f"{ENDPOINT} {endpoint!r} is no http:// address.", f"Unset {ENDPOINT}."
            )
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix, self._token = parts.path.rstrip("/"), ""

    @staticmethod
    def here(environment: Mapping[str, str] = os.environ) -> InstanceMetadata | None:
        """As botocore would reach it; None where it is switched off. Raises SettingsError."""
        if environment.get(DISABLED, "").lower() == "true":
            return None
        default = DEFAULT_ENDPOINTS.get(environment.get(MODE, "ipv4").lower(), "")
        return InstanceMetadata(environment.get(ENDPOINT) or default or DEFAULT_ENDPOINTS["ipv4"])

    def get(self, path: str) -> str | None:
        """The text at `path` below /latest/meta-data; None when it says there is none (404).

        Raises OSError or HTTPException for anything else: no answer, another status, a refused token.
        """
        for _ in range(2):
            if not self._token:
                lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                status, self._token = self._ask("PUT", "/latest/api/token", lifetime)
                if status != 200:
                    self._token = ""
                    raise OSError(f"instance metadata gave no token: status {status}")
            token = {"X-aws-ec2-metadata-token": self._token}
            status, text = self._ask("GET", f"/latest/meta-data/{path}", token)
            if status == 200:
                return text
            if status == 404:
                return None
            self._token = ""  # it may have run out
            if status != 401:
                break
        raise OSError(f"instance metadata answered {status} for {path}")

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, self._prefix + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(LONGEST_ANSWER).decode(errors="replace")
        finally:
            connection.close()
