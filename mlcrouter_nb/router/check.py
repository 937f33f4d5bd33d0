"""What is wrong with a policy's source, found before it may replace the policy that serves."""

import ast
import builtins
import dis
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from types import CodeType

from ..protocol.errors import PolicyError
from .attributes import unknown_attributes
from .awaits import wrong_awaits
from .failures import policy_error
from .namespace import GIVEN

KNOWN = frozenset(dir(builtins)) | frozenset(GIVEN) | {"__name__", "__doc__", "__file__", "__builtins__"}

# The last one is 3.12's, for class bodies within functions.
LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def check_source(
    name: str, source: str, origin: str, filename: str, *, need_route: bool = True
) -> ast.Module:
    """The parsed source; raises `PolicyError` with the first line that is wrong."""

    def wrong(line: int | None, problem: str) -> PolicyError:
        return policy_error(name, origin, filename, line, problem)

    try:
        tree = ast.parse(source, filename)
        code = compile(tree, filename, "exec")
    except SyntaxError as error:
        raise wrong(error.lineno, f"SyntaxError: {error.msg}") from error
    except ValueError as error:  # a NUL byte
        raise wrong(None, f"SyntaxError: {error}") from error
    if need_route:
        check_route(tree, wrong)
    for line, undefined, known in undefined_names(code):
        raise wrong(line, f"name '{undefined}' is not defined.{did_you_mean(undefined, known)}")
    for line, owner, attribute, known in unknown_attributes(tree):
        raise wrong(
            line,
            f"{owner} has no '{attribute}'.{did_you_mean(attribute, known) or _by_name(owner, attribute)}",
        )
    for line, problem in wrong_awaits(tree):
        raise wrong(line, problem)
    return tree


def check_route(tree: ast.Module, wrong: Callable[[int | None, str], PolicyError]) -> None:
    """There is one `async def route(request, engines)`."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    routes = [node for node in tree.body if node in found and getattr(node, "name", "") == "route"]
    if not routes:
        close = get_close_matches("route", [node.name for node in found], 1)
        hint = f" There is '{close[0]}'; call it 'route'." if close else ""
        raise wrong(
            None, f"it defines no 'route'; a policy is `async def route(request, engines): ...`.{hint}"
        )
    route = routes[-1]
    if not isinstance(route, ast.AsyncFunctionDef):
        raise wrong(
            route.lineno, "route must be an async function: write `async def route(request, engines):`."
        )
    args = route.args
    positional = len(args.posonlyargs) + len(args.args)
    needed = positional - len(args.defaults)
    keyword_only = any(default is None for default in args.kw_defaults)
    takes_two = needed <= 2 and (positional >= 2 or args.vararg is not None)
    if not takes_two or keyword_only:
        raise wrong(route.lineno, "route takes two arguments: write `async def route(request, engines):`.")


def assigned_globals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`(line, name)` of each `global name` in a function of the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from ((node.lineno, name) for name in node.names)


def undefined_names(code: CodeType) -> Iterator[tuple[int | None, str, list[str]]]:
    """`(line, name, names that exist)` for each global name that nothing in the source defines."""
    codes = list(nested(code))
    defined = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
    for inner in codes:
        defined |= {i.argval for i in dis.get_instructions(inner) if i.opname == "STORE_GLOBAL"}
        if any(star_import(i) for i in dis.get_instructions(inner)):
            return  # a star import may define anything
    known = KNOWN | defined
    for inner in codes:
        local = {i.argval for i in dis.get_instructions(inner) if i.opname == "STORE_NAME"}
        line = None
        for i in dis.get_instructions(inner):
            line = i.positions.lineno if i.positions else line
            if i.opname in LOADS and i.argval not in known and i.argval not in local:
                yield line, i.argval, sorted(known | set(inner.co_varnames))


def star_import(instruction: dis.Instruction) -> bool:
    """Whether this is where `from module import *` happens (3.12 made it an intrinsic)."""
    return instruction.opname == "IMPORT_STAR" or instruction.argrepr == "INTRINSIC_IMPORT_STAR"


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def _by_name(owner: str, attribute: str) -> str:
    return f' An engine is found by its name: engines["{attribute}"].' if owner == "engines" else ""


def did_you_mean(name: str, known: list[str]) -> str:
    """` Did you mean 'x'?`, or nothing."""
    close = get_close_matches(name, known, 1, 0.7)
    return f" Did you mean '{close[0]}'?" if close else ""
