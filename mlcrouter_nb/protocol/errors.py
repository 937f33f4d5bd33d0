"""One family of errors; each message is a sentence that names the thing and the remedy."""

from typing import Any


class MlcRouterError(Exception):
    """Anything that mlcrouter_nb reports to its user."""


class ArgumentError(MlcRouterError):
    """A wrong argument: exit code 2 on the command line, a `UsageError` in a notebook."""


class BootError(MlcRouterError):
    """An engine did not start; names the engine, its exit code and the last lines of its log."""


class PolicyError(MlcRouterError):
    """A policy that cannot be compiled, or that failed while it routed a request.

    `line` counts from 1 in the policy's source, `source_line` is that line's text; None and "" where no line is to
    blame. The message holds both."""

    def __init__(
        self, message: str, *, policy: str = "", line: int | None = None, source_line: str = ""
    ) -> None:
        super().__init__(message)
        self.policy = policy
        self.line = line
        self.source_line = source_line


class RequestError(MlcRouterError):
    """A request that is refused, as OpenAI's API reports it.

    `status` is the HTTP status; `type`, `param` and `code` are fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {"message", "type", "param", "code"}}`.

        Source: https://platform.openai.com/docs/guides/error-codes"""
        return error_body(str(self), type=self.type, param=self.param, code=self.code)


class EngineError(MlcRouterError):
    """An engine refused or broke a call.

    `status` is the engine's HTTP status, 0 when the connection failed, 504 when it kept silent; `engine` is its name,
    `verb` the call that it refused, `body` what it answered, `retry_after` the header of that name."""

    def __init__(
        self, message: str, *, engine: str = "", verb: str = "", status: int = 0, body: bytes = b"",
        retry_after: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.engine, self.verb = engine, verb
        self.status = status
        self.body = body
        self.retry_after = retry_after


def error_body(
    message: str, *, type: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object as a dict."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
