"""Verbs and attributes that a policy asks engines and requests for, and that they do not have.

Only what plainly comes from the arguments of `route` is followed (`engines.decode.least_loaded()`, names that it is
assigned to, loops over a group); anything else is left to run time."""

import ast
from collections.abc import Iterator
from difflib import get_close_matches

from ..protocol.openai import ChatCompletionRequest, CompletionRequest

# What each kind of object offers, and of which kind that is; "" is anything.
ENDPOINT = {
    "name": "", "url": "", "role": "", "kind": "", "rank": "", "model": "", "available": "",
    "in_flight": "", "waiting_tokens": "",
    "prep_recv": "kv", "remote_send": "", "start_generate": "stream", "complete": "stream",
}  # fmt: skip
REQUEST = (
    "prompt", "text", "id", "session", "headers", "arrival", "chat", "kv_window_end", "body", "trace",
    *CompletionRequest.model_fields, *ChatCompletionRequest.model_fields,
)  # fmt: skip
GROUP = {"least_loaded": "engine", "round_robin": "engine", "random": "engine"}
KINDS: dict[str, dict[str, str]] = {
    "engines": {"prefill": "group", "decode": "group", "all": "group"},
    "group": GROUP,
    "engine": ENDPOINT,
    "request": dict.fromkeys(REQUEST, ""),
    "kv": {"prefix_matched_length": "", "end": "", "endpoint": "engine"},
}
OWNERS = {
    "request": "a request",
    "engines": "engines",
    "group": "a group of engines",
    "engine": "an engine",
    "kv": "what prep_recv answers",
}


def unknown_attributes(tree: ast.Module) -> Iterator[tuple[int, str, str, list[str]]]:
    """`(line, what lacks it, attribute, attributes that exist)`."""
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "route":
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args)][:2]
            if len(arguments) == 2:
                kinds = {arguments[0]: "request", arguments[1]: "engines"}
                learn_names(node, kinds)
                yield from look(node, kinds)


def learn_names(route: ast.AsyncFunctionDef, kinds: dict[str, str]) -> None:
    """Follow assignments and loops; a name that is ever given something else is not followed."""
    given: dict[str, set[str]] = {}
    for _ in range(3):  # a name may depend on names that are assigned further down
        given.clear()
        for node in ast.walk(route):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    note(target, kind_of(node.value, kinds), given)
            elif isinstance(node, ast.NamedExpr):
                note(node.target, kind_of(node.value, kinds), given)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                over = kind_of(node.iter, kinds)
                note(node.target, "engine" if over in ("group", "engines") else "", given)
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                note(node.target, "", given)
            elif isinstance(node, ast.arg) and node.arg not in kinds:
                given.setdefault(node.arg, set()).add("")
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                note(node.optional_vars, "", given)
        for name, found in given.items():
            if len(found) == 1 and (kind := next(iter(found))):
                kinds[name] = kind
            else:
                kinds.pop(name, None)


def note(target: ast.expr, kind: str, given: dict[str, set[str]]) -> None:
    """A target is given something of a kind."""
    if isinstance(target, ast.Name):
        given.setdefault(target.id, set()).add(kind)
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            note(element, "", given)
    elif isinstance(target, ast.Starred):
        note(target.value, "", given)


def kind_of(node: ast.expr, kinds: dict[str, str]) -> str:
    """The kind of an expression; "" is unknown."""
    if isinstance(node, ast.Name):
        return kinds.get(node.id, "")
    if isinstance(node, ast.Await):
        return kind_of(node.value, kinds)
    if isinstance(node, ast.Call):
        return kind_of(node.func, kinds) if isinstance(node.func, ast.Attribute) else ""
    if isinstance(node, ast.Attribute):
        return KINDS.get(kind_of(node.value, kinds), {}).get(node.attr, "")
    if isinstance(node, ast.Subscript):
        owner = kind_of(node.value, kinds)
        whole = isinstance(node.slice, ast.Slice)
        return "engine" if owner in ("group", "engines") and not whole else ""
    return ""


def look(route: ast.AsyncFunctionDef, kinds: dict[str, str]) -> Iterator[tuple[int, str, str, list[str]]]:
    """Every attribute of a known kind that this kind does not have."""
    for node in ast.walk(route):
        if isinstance(node, ast.Attribute):
            kind = kind_of(node.value, kinds)
            known = KINDS.get(kind)
            if known is None or node.attr in known or node.attr.startswith("__"):
                continue
            # A client may send fields that only its engine knows, so an unknown one is wrong only if it looks so.
            if kind != "request" or get_close_matches(node.attr, known, 1, 0.8):
                yield node.lineno, OWNERS[kind], node.attr, sorted(known)
