"""Policies: an async function named `route`, compiled from a cell or a file, with its parameters."""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from importlib import resources
from typing import Any

from ..protocol.errors import ArgumentError, EngineError, MlcRouterError, PolicyError
from ..telemetry.views import PolicyView
from .check import assigned_globals, check_source, did_you_mean
from .failures import describe, line_in_traceback, policy_error, remember
from .namespace import Namespace
from .parameters import Parameter

MICROSERVING = ("prep_recv", "remote_send", "start_generate")  # refused where windows or engines do not fit


class Policy:
    """What routes requests: `route`, its parameters and their values now.

    `origin` says where it was written ("built-in", "cell [7]", a path), `source` is its text, `doc` its docstring."""

    def __init__(
        self, name: str, origin: str, source: str, doc: str, parameters: dict[str, Parameter],
        *, filename: str, namespace: Namespace, route: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.name = name
        self.origin = origin
        self.source = source
        self.doc = doc
        self.parameters = parameters
        self.filename = filename
        self.last_used: Mapping[str, Any] = {}
        self._namespace = namespace
        self._route = route
        self._namespace.current = {name: parameter.value for name, parameter in parameters.items()}

    @property
    def values(self) -> Mapping[str, Any]:
        """The parameters' values now; never changed in place, so a request may keep it."""
        return self._namespace.current

    def set(self, **values: Any) -> None:
        """Set parameters, all or none; the next request sees them. Raises `ArgumentError`."""
        checked = {}
        for name, value in values.items():
            if name not in self.parameters:
                has = ", ".join(self.parameters) or "none"
                raise ArgumentError(f"policy '{self.name}' has no parameter '{name}'; it has: {has}.")
            checked[name] = self.parameters[name].check(name, value)
        self._namespace.current = {**self._namespace.current, **checked}

    def start(self, request: Any, engines: Any, values: Mapping[str, Any]) -> Any:
        """The coroutine or async generator that routes a request with the values that held when it began."""
        self._namespace.hold(values)
        return self._route(request, engines)

    def error(self, problem: str, line: int | None = None) -> PolicyError:
        """A `PolicyError` that shows a line of this policy."""
        return policy_error(self.name, self.origin, self.filename, line, problem)

    def failure(self, error: BaseException, problem: str = "") -> PolicyError:
        """What an exception in the policy's code becomes: the user's line, and what went wrong."""
        problem = problem or (str(error) if type(error) is MlcRouterError else describe(error))
        return self.error(problem, line_in_traceback(error.__traceback__, self.filename))

    def placed(self, error: EngineError) -> EngineError | None:
        """The same error, with this policy's line where an engine refused what the policy asked of it; else None."""
        refused = 400 <= error.status < 500 and error.verb in MICROSERVING
        if self.origin == "built-in" or not refused:
            return None
        placed = copy(error)
        placed.args = (str(self.failure(error, str(error))),)
        return placed

    def view(self) -> PolicyView:
        """What the panel shows."""
        values = self.values
        parameters = tuple(
            parameter.view(name, values[name], self.last_used.get(name))
            for name, parameter in self.parameters.items()
        )
        return PolicyView(self.name, self.origin, self.source, self.doc, parameters)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"<policy {self.name} ({self.origin}){': ' + values if values else ''}>"


def compile_policy(name: str, source: str, origin: str = "", filename: str | None = None) -> Policy:
    """Check a policy's source and run its module level once.

    Raises `PolicyError` with the user's line for a syntax error, a missing `route`, a wrong signature, a name that
    nothing defines, a verb that engines do not have, or whatever its module level raises."""
    filename = filename or f"<policy {name}, {origin or 'source'}>"
    remember(filename, source)
    tree = check_source(name, source, origin, filename)
    namespace = run_module(name, tree, origin, filename)
    parameters = take_parameters(namespace)
    for line, assigned in assigned_globals(tree):
        if assigned in parameters:
            problem = f"'{assigned}' is a parameter, which only its control sets; assign to another name."
            raise policy_error(name, origin, filename, line, problem)
    route = namespace["route"]
    doc = ast.get_docstring(tree) or inspect.getdoc(route) or ""
    return Policy(
        name, origin, source, doc, parameters, filename=filename, namespace=namespace, route=route
    )  # fmt: skip


def run_module(name: str, tree: ast.Module, origin: str, filename: str) -> Namespace:
    """Execute a source's module level in a namespace of its own."""
    namespace = Namespace(name)
    try:
        exec(compile(tree, filename, "exec"), namespace)
    except Exception as error:
        line = line_in_traceback(error.__traceback__, filename)
        problem = str(error) if isinstance(error, MlcRouterError) else describe(error)
        raise policy_error(name, origin, filename, line, problem) from error
    return namespace


def take_parameters(namespace: Namespace) -> dict[str, Parameter]:
    """Move the parameters out of a namespace, where `__missing__` answers for them from then on."""
    found: Iterator[tuple[str, Any]] = iter(list(namespace.items()))
    return {name: namespace.pop(name) for name, value in found if isinstance(value, Parameter)}


class PolicyBook:
    """All policies by name: the built-in ones, and those that cells and files define; a later one shadows."""

    def __init__(self) -> None:
        self._policies = {policy.name: policy for policy in built_in_policies()}

    def names(self) -> list[str]:
        """In order: the built-in ones first, then as they were defined."""
        return list(self._policies)

    def get(self, name: str) -> Policy:
        """Raises `ArgumentError` that lists what there is."""
        policy = self._policies.get(name)
        if policy is None:
            raise ArgumentError(
                f"there is no policy '{name}'.{did_you_mean(name, self.names())} There are: {', '.join(self.names())}."
            )
        return policy

    def define(self, policy: Policy) -> Policy:
        """Add a policy, or replace the one of that name; requests in flight finish under the old one."""
        self._policies[policy.name] = policy
        return policy

    def compile(self, name: str, source: str, origin: str = "", filename: str | None = None) -> Policy:
        """What a cell means, without adding it: a policy, or the known one of that name with the cell's parameters.

        Raises `PolicyError` as `compile_policy` does."""
        if name in self._policies and has_parameters_only(source):
            return self.parameters_only(name, source, origin, filename)
        return compile_policy(name, source, origin, filename)

    def parameters_only(
        self, name: str, source: str, origin: str = "", filename: str | None = None
    ) -> Policy:
        """The policy of that name with other ranges and values for some of its parameters, without adding it."""
        base = self.get(name)
        filename = filename or f"<policy {name}, {origin or 'source'}>"
        remember(filename, source)
        tree = check_source(name, source, origin, filename, need_route=False)
        run_module(
            name, tree, origin, filename
        )  # what is wrong shows at the line of this source, not the base's
        places = assigned_names(ast.parse(base.source))
        lines = base.source.splitlines()
        for target, node in sorted(assigned_names(tree).items()):
            place = places.get(target)
            if place is None:
                known = list(base.parameters)
                problem = f"policy '{name}' has no parameter '{target}'.{did_you_mean(target, known)}"
                raise policy_error(name, origin, filename, node.lineno, problem)
            lines[place.lineno - 1] = ast.get_source_segment(source, node) or ""
            for line in range(place.lineno, place.end_lineno or place.lineno):
                lines[line] = ""
        return compile_policy(name, "\n".join(lines) + "\n", origin or base.origin)


def has_parameters_only(source: str) -> bool:
    """Whether a source only assigns names (comments and a docstring aside)."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    return all(
        isinstance(node, ast.Assign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


def assigned_names(tree: ast.Module) -> dict[str, ast.Assign]:
    """The module-level assignments `name = ...`."""
    return {
        node.targets[0].id: node
        for node in tree.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }


def built_in_policies() -> Iterator[Policy]:
    """The files beside this one in `policies/`, compiled as a cell would be: `least_loaded.py` is `least-loaded`."""
    folder = resources.files(__package__).joinpath("policies")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py") and not file.name.startswith("_"):
            name = file.name.removesuffix(".py").replace("_", "-")
            yield compile_policy(name, file.read_text(encoding="utf-8"), "built-in", str(file))
