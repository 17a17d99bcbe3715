"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A refusal or failure a client gets as {"error": {message, type, param, code}}."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def error_type(status: int) -> str:
    """OpenAI's name for the kind of error that goes with an HTTP status."""
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 404:
        return "not_found_error"
    return "server_error" if status >= 500 else "invalid_request_error"
