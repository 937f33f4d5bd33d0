"""The status of a cluster as a table: for terminals, for notebooks, for pages made from them."""

from collections.abc import Callable
from html import escape
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from ...telemetry import EngineView, ParameterView, PolicyView, Snapshot
from .theme import ERROR, FONT, INK, LINE, MONO, MUTED, engine_colour

NOTHING_RUNS = "No cluster is running. %route up boots one; %route help lists the rest."


class Status:
    """A snapshot that shows itself as text and as HTML."""

    def __init__(self, snapshot: Snapshot | None, chosen: PolicyView | None = None) -> None:
        self.snapshot = snapshot
        self.chosen = chosen

    def __repr__(self) -> str:
        if self.snapshot is None:
            return NOTHING_RUNS + (
                f"\npolicy   {policy_line(self.chosen)}" if self.chosen is not None else ""
            )
        return status_text(self.snapshot)

    def _repr_html_(self) -> str:
        if self.snapshot is None:
            return f'<div style="font-family:{FONT};color:{MUTED};white-space:pre-line">{escape(repr(self))}</div>'
        return status_html(self.snapshot)


def register_formatters(shell: InteractiveShell) -> Callable[[], None]:
    """Let a cell that ends with a Cluster show its status; answers the function that undoes it."""
    from ...cluster import Cluster

    formatter: Any = shell.display_formatter
    text, html = formatter.formatters["text/plain"], formatter.formatters["text/html"]
    text.for_type(Cluster, lambda cluster, printer, cycle: printer.text(status_text(cluster.status())))
    html.for_type(Cluster, lambda cluster: status_html(cluster.status()))

    def undo() -> None:
        for each in (text, html):
            each.pop(Cluster, None)

    return undo


def headline(snapshot: Snapshot) -> list[str]:
    """State, model, engine kind and address."""
    kernels = {engine.kernels for engine in snapshot.engines if engine.kernels}
    kind = " ".join([snapshot.kind, *sorted(kernels)]).strip()
    return [part for part in (snapshot.state, snapshot.model, kind, snapshot.url) if part]


def policy_line(policy: PolicyView | None) -> str:
    """`disagg: pd_balance_factor=0.3 (built-in)`."""
    if policy is None:
        return "none"
    values = ", ".join(f"{parameter.name}={parameter_value(parameter)}" for parameter in policy.parameters)
    return f"{policy.name}{': ' + values if values else ''}" + (
        f" ({policy.origin})" if policy.origin else ""
    )


def parameter_value(parameter: ParameterView) -> str:
    """A value without the digits that floats carry along."""
    return f"{parameter.value:.6g}" if isinstance(parameter.value, float) else str(parameter.value)


def requests_line(snapshot: Snapshot) -> str:
    """How many run, ended well, and failed."""
    return f"{snapshot.in_flight} in flight, {snapshot.finished} finished, {snapshot.failed} failed"


COLUMNS = (
    "engine",
    "role",
    "state",
    "in flight",
    "waiting tokens",
    "KV pages",
    "prefill tok/s",
    "decode tok/s",
    "at",
)


def row(engine: EngineView) -> tuple[str, ...]:
    """One engine's cells, in the order of `COLUMNS`."""
    pages = (
        "–" if engine.kv_pages_total is None else f"{engine.kv_pages_used or 0:,} / {engine.kv_pages_total:,}"
    )
    return (
        engine.name,
        engine.role or "both",
        engine.state,
        f"{engine.in_flight:,}",
        f"{engine.waiting_tokens:,}",
        pages,
        rate(engine.prefill_tokens_per_s),
        rate(engine.decode_tokens_per_s),
        engine.url.removeprefix("http://"),
    )


def rate(tokens_per_s: float | None) -> str:
    """Tokens per second for people; a dash where it is not known."""
    return "–" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def table_text(header: tuple[str, ...], rows: list[tuple[str, ...]], *, numbers: range) -> str:
    """Aligned columns; those in `numbers` to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = []
    for line in (header, *rows):
        cells = [
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def status_text(snapshot: Snapshot) -> str:
    """The status for a terminal."""
    lines = [" · ".join(headline(snapshot))]
    if snapshot.engines:
        lines.append(table_text(COLUMNS, [row(engine) for engine in snapshot.engines], numbers=range(3, 8)))
    lines.append(f"policy   {policy_line(snapshot.policy)}")
    lines.append(f"requests {requests_line(snapshot)}")
    lines += [
        f"{engine.name} {engine.state}: {engine.detail}" for engine in snapshot.engines if engine.detail
    ]
    if snapshot.problem:
        lines.append(snapshot.problem)
    return "\n".join(lines)


def status_html(snapshot: Snapshot) -> str:
    """The status for a notebook; everything that comes from outside is escaped."""
    right = f"text-align:right;padding:3px 10px;font-variant-numeric:tabular-nums;color:{INK};background:none"
    left = right.replace("text-align:right", "text-align:left")
    head = "".join(
        f'<th scope="col" style="{right if 3 <= i < 8 else left};color:{MUTED};font-weight:normal">{escape(name)}</th>'
        for i, name in enumerate(COLUMNS)
    )
    body = ""
    for place, engine in enumerate(snapshot.engines):
        cells = row(engine)
        mark = f"border-left:4px solid {engine_colour(place)};font-weight:600"
        body += f'<tr style="background:none;border-top:1px solid {LINE}"><th scope="row" style="{left};{mark}">{escape(cells[0])}</th>'
        body += "".join(
            f'<td style="{right if 3 <= i < 8 else left}">{escape(cell)}</td>'
            for i, cell in enumerate(cells)
            if i
        )
        body += "</tr>"
    title, *rest = headline(snapshot)
    details = "".join(
        f'<pre style="color:{ERROR if engine.state == "failed" else MUTED};margin:4px 0;font-size:12px;'
        f'background:none;white-space:pre-wrap">{escape(engine.name)} {escape(engine.state)}: '
        f"{escape(engine.detail)}</pre>"
        for engine in snapshot.engines
        if engine.detail
    )
    if snapshot.problem:
        details += f'<div role="alert" style="color:{ERROR};margin:4px 0">{escape(snapshot.problem)}</div>'
    table = (
        f'<table style="border-collapse:collapse;margin:6px 0;font-size:13px"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
        if body
        else ""
    )
    return (
        f'<div style="font-family:{FONT};color:{INK};font-size:13px"><div><b>{escape(title)}</b>'
        + "".join(f' <span style="color:{MUTED}"> · {escape(part)}</span>' for part in rest)
        + f"</div>{table}{details}"
        f'<div><span style="color:{MUTED}">policy</span> '
        f'<span style="font-family:{MONO}">{escape(policy_line(snapshot.policy))}</span>'
        f'<span style="color:{MUTED}"> &nbsp; requests</span> {escape(requests_line(snapshot))}</div></div>'
    )


def show(value: Any) -> None:
    """Display under the cell that runs."""
    from IPython.display import display

    display(value)
