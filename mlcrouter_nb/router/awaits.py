"""Verbs that are called without the `await` that they need, or with one that they cannot take.

Only what is plain in the source is told; a coroutine that is kept for `asyncio.gather` and the like is nobody's fault."""

import ast
from collections.abc import Iterator

AWAITED = ("prep_recv", "remote_send")
STREAMS = ("start_generate", "complete")


def wrong_awaits(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`(line, problem)` of each verb whose `await` is missing or too much."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    uses = _uses_of_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Await):
            verb = _verb(node.value, STREAMS)
            if verb and verb not in own:
                yield node.lineno, f"leave out `await`: {verb} gives a stream, which is returned or iterated."
        for call in _not_awaited(node, uses):
            if _verb(call, AWAITED) not in own:
                yield (
                    call.lineno,
                    f"nothing happens without await: write `await {ast.unparse(call.func)}(...)`.",
                )


def _not_awaited(node: ast.AST, uses: dict[str, list[ast.AST]]) -> Iterator[ast.Call]:
    """Calls of verbs right within a node that cannot be awaited any more from there on."""
    lost: list[ast.expr] = []
    if isinstance(node, ast.Expr | ast.Attribute):
        lost = [node.value]
    elif isinstance(node, ast.Call) and _verb(node, AWAITED + STREAMS):
        lost = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Name) and all(_as_answer(use) for use in uses.get(target.id, ()))
        for target in node.targets
    ):
        lost = [node.value]
    yield from (value for value in lost if isinstance(value, ast.Call) and _verb(value, AWAITED))


def _as_answer(use: ast.AST) -> bool:
    """Whether a name is used as what a verb answers: its attributes are read, or a verb is given it."""
    return isinstance(use, ast.Attribute) or bool(_verb(use, AWAITED + STREAMS))


def _uses_of_names(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """The nodes right above each place where a name is read; a keyword's is its call."""
    uses: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            inner = child.value if isinstance(child, ast.keyword) else child
            if (
                isinstance(inner, ast.Name)
                and isinstance(inner.ctx, ast.Load)
                and not isinstance(node, ast.keyword)
            ):
                uses.setdefault(inner.id, []).append(node)
    return uses


def _verb(node: ast.AST, verbs: tuple[str, ...]) -> str:
    """The verb that an expression calls, of some; "" if it calls none of them."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in verbs:
        return node.func.attr
    return ""
