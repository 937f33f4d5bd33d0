"""A policy's source, coloured where the front end can."""

from html import escape

from ...router.policy import Policy
from .status import policy_line
from .theme import FONT, MUTED


class Source:
    """Shows a policy as text and as HTML."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __repr__(self) -> str:
        return f"# {policy_line(self.policy.view())}\n{self.policy.source.rstrip()}"

    def _repr_html_(self) -> str:
        line = f'<div style="font-family:{FONT};color:{MUTED};font-size:13px">{escape(policy_line(self.policy.view()))}</div>'
        try:
            from pygments import highlight
            from pygments.formatters import HtmlFormatter
            from pygments.lexers import PythonLexer
        except ImportError:
            return f"{line}<pre>{escape(self.policy.source)}</pre>"
        # Lab styles the classes of `highlight`, in its light and its dark theme.
        return line + highlight(self.policy.source, PythonLexer(), HtmlFormatter(cssclass="highlight"))
