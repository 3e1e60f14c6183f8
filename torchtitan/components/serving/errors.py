"""Errors that a client gets, in the shape of OpenAI's API."""

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        message: the mistake, the value and the remedy.
        status: HTTP status.
        param: name of the field at fault.
        code: short name of the mistake for programs.
        headers: more headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    def to_dict(self) -> dict[str, object]:
        """Return the body of the answer."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        fields = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": fields}
