"""What goes wrong with an API request, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import msgspec

_KINDS = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """One refusal or failure. ``param`` names the field at fault; ``retry_after_s`` > 0 becomes ``Retry-After``."""

    def __init__(self, code: int, message: str, param: str = "", retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON that the client sees."""
        kind = _KINDS.get(self.code, "internal_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param or None, "code": self.code}}


def invalid(param: str, value: object, allowed: str) -> ApiError:
    """A 400 that names the parameter, the value seen and what is allowed."""
    shown = msgspec.json.encode(value).decode() if isinstance(value, msgspec.Struct) else repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ApiError(400, f"{param}: {shown} is not allowed; {allowed}", param)
