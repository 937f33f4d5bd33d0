import linecache
import traceback

import pytest

from mlcrouter_nb.protocol.errors import ArgumentError, PolicyError
from mlcrouter_nb.router.policy import PolicyBook, compile_policy

ROUTE = "async def route(request, engines):\n"


@pytest.mark.parametrize(
    ("source", "line", "says"),
    [
        ("def f(:\n", 1, "SyntaxError"),
        ("x = '\0'", None, "SyntaxError"),
        ("x = 1\n", None, "defines no 'route'"),
        ("async def rout(request, engines): ...\n", None, "There is 'rout'"),
        ("def route(request, engines): ...\n", 1, "async"),
        ("async def route(request): ...\n", 1, "two arguments"),
        ("async def route(request, engines, more): ...\n", 1, "two arguments"),
        ("async def route(request, engines, *, more): ...\n", 1, "two arguments"),
        (ROUTE + "    x = 1\n    return decode\n", 3, "name 'decode' is not defined"),
        (ROUTE + "    return asincio.sleep(1)\n", 2, "Did you mean 'asyncio'"),
        (
            "def helper():\n    return [nothing for _ in ()]\n" + ROUTE + "    return helper()\n",
            2,
            "'nothing'",
        ),
        (
            ROUTE + "    d = engines.decode.least_loaded()\n    await d.prep_recieve(request)\n",
            3,
            "'prep_recv'",
        ),
        (ROUTE + "    return engines.decod.least_loaded()\n", 2, "Did you mean 'decode'"),
        (ROUTE + "    return engines.decode.lest_loaded().complete(request)\n", 2, "'least_loaded'"),
        (ROUTE + '    return engines["D1"].completed(request)\n', 2, "'complete'"),
        (
            ROUTE + "    return min(engines.all, key=lambda x: 1) if [e.load for e in engines] else 1\n",
            2,
            "'load'",
        ),
        (
            ROUTE + "    kv = await engines.decode[0].prep_recv(request)\n    return kv.matched\n",
            3,
            "no 'matched'",
        ),
        (ROUTE + "    return len(request.promt)\n", 2, "Did you mean 'prompt'"),
        (ROUTE + "    return engines.D1.complete(request)\n", 2, 'its name: engines["D1"]'),
        (
            ROUTE + "    d = engines.decode[0]\n    kv = d.prep_recv(request, end=5)\n    return kv.end\n",
            3,
            "write `await d.prep_recv(...)`",
        ),
        (
            ROUTE
            + "    d = engines.all[0]\n    kv = d.prep_recv(request)\n    await d.remote_send(request, kv=kv)\n",
            3,
            "await d.prep_recv",
        ),
        (
            ROUTE
            + "    kv = await engines.all[1].prep_recv(request)\n    engines.all[0].remote_send(request, kv)\n",
            3,
            "write `await engines.all[0].remote_send(...)`",
        ),
        (ROUTE + "    return engines.all[0].prep_recv(request).end\n", 2, "await"),
        (ROUTE + "    return await engines.all[0].complete(request)\n", 2, "leave out `await`: complete"),
        (
            ROUTE
            + "    async for c in await engines.all[0].start_generate(request, begin=1):\n        yield c\n",
            2,
            "leave out `await`: start_generate",
        ),
        ("x = slider(1, 0)\n" + ROUTE + "    pass\n", 1, "empty"),
        ("x = slider(0, 4)\n" + ROUTE + "    global x\n    x = 2\n", 3, "'x' is a parameter"),
        ("import nothing_like_it\n" + ROUTE + "    pass\n", 1, "ModuleNotFoundError"),
        ("for i in (1, 0):\n    1 / i\n" + ROUTE + "    pass\n", 2, "ZeroDivisionError"),
        ("x = slider(0, 4)\ny = x / 2\n" + ROUTE + "    pass\n", 2, "TypeError"),
    ],
)
def test_what_is_wrong_is_shown_with_its_line(source, line, says):
    with pytest.raises(PolicyError, match="policy 'p', cell \\[7\\]") as caught:
        compile_policy("p", source, "cell [7]")
    error = caught.value
    assert says in str(error)
    assert error.line == line
    if line is not None and "\0" not in source:
        assert error.source_line == source.splitlines()[line - 1].strip()
        assert error.source_line in str(error)


@pytest.mark.parametrize(
    "source",
    [
        ROUTE + "    return engines.all.round_robin().complete(request)\n",
        ROUTE + "    kv = engines.all[0].prep_recv(request)\n    kv = await kv\n    return kv.end\n",
        ROUTE
        + "    kv = engines.all[0].prep_recv(request)\n    kv, _ = await asyncio.gather(kv, asyncio.sleep(1))\n"
        "    return kv.end\n",
        ROUTE + "    await asyncio.wait_for(engines.all[0].prep_recv(request), timeout=3)\n",
        ROUTE + "    tasks = [e.prep_recv(request) for e in engines]\n    await asyncio.gather(*tasks)\n",
        "class Mine:\n    async def complete(self, x): ...\n"
        + ROUTE
        + "    return await Mine().complete(request)\n",
        ROUTE + "    async for chunk in engines.decode[0].complete(request):\n        yield chunk\n",
        "async def route(*both):\n    return both\n",
        "async def route(request, engines, extra=None):\n    return extra\n",
        "from math import *\n" + ROUTE + "    return floor(sin(1))\n",
        "import time as clock\n" + ROUTE + "    return clock.time()\n",
        "class A:\n    x = 1\n    y = x\n" + ROUTE + "    return A.y, __name__\n",
        ROUTE + "    global seen\n    seen = 1\n    return seen\n",
        ROUTE + "    engines = [1]\n    return engines.index(1)\n",
        ROUTE + "    e = engines.all[0]\n    e = e.name\n    return e.upper()\n",
        ROUTE + "    return [e.in_flight for e in engines.all if e.role], engines.all[:2].count(1)\n",
        ROUTE + "    return request.min_p, request.temperature, request.session\n",
        ROUTE + "    try:\n        pass\n    except ValueError as error:\n        return error\n",
    ],
)
def test_what_is_right_passes(source):
    assert compile_policy("p", source).name == "p"


def test_a_cell_sees_nothing_of_the_notebook():
    with pytest.raises(PolicyError, match="name 'pytest' is not defined"):
        compile_policy("p", ROUTE + "    return pytest\n")


def test_tracebacks_show_the_users_line():
    policy = compile_policy("p", ROUTE + "    return 1 / 0  # here\n", "cell [2]")
    try:
        policy.start(None, None, {}).send(None)
    except ZeroDivisionError as error:
        assert "return 1 / 0  # here" in "".join(traceback.format_exception(error))
    linecache.checkcache()
    assert linecache.getline(policy.filename, 2) == "    return 1 / 0  # here\n"


def test_the_book_holds_the_built_in_policies():
    book = PolicyBook()
    assert {"round-robin", "least-loaded", "disagg"} <= set(book.names())
    for name in book.names():
        policy = book.get(name)
        assert policy.origin == "built-in"
        assert "Source: " in policy.doc
        assert len(policy.source.splitlines()) <= 20
    with pytest.raises(ArgumentError, match="Did you mean 'disagg'"):
        book.get("disag")


def test_a_body_of_parameters_only_is_the_policy_of_that_name_with_these():
    book = PolicyBook()
    source = "# half at most\npd_balance_factor = slider(0.0, 0.5,\n    value=0.1)\n"
    policy = book.compile("disagg", source, "cell [5]")
    assert policy.values == {"pd_balance_factor": 0.1}
    assert policy.parameters["pd_balance_factor"].high == 0.5
    assert policy.origin == "cell [5]"
    assert "prep_recv" in policy.source  # so that what `show` and `save` give is whole
    assert book.get("disagg").origin == "built-in"
    book.define(policy)
    assert book.get("disagg") is policy
    assert (
        book.compile("disagg", "pd_balance_factor = slider(0.0, 1.0)").parameters["pd_balance_factor"].high
        == 1.0
    )


def test_a_constant_takes_a_parameter_away():
    policy = PolicyBook().compile("disagg", "pd_balance_factor = 0.3", "cell [5]")
    assert policy.parameters == {}


@pytest.mark.parametrize(
    ("source", "line", "says"),
    [
        ("\npd_balance = slider(0.0, 1.0)\n", 2, "Did you mean 'pd_balance_factor'"),
        ("\npd_balance_factor = slider(0.0, 1.0, value=1.5)\n", 2, "between 0.0 and 1.0"),
        ("pd_balance_factor = slidr(0.0, 1.0)\n", 1, "Did you mean 'slider'"),
    ],
)
def test_wrong_parameters_are_shown_at_their_own_line(source, line, says):
    with pytest.raises(PolicyError) as caught:
        PolicyBook().compile("disagg", source, "cell [5]")
    assert says in str(caught.value)
    assert caught.value.line == line


def test_parameters_alone_for_a_name_that_nobody_knows_are_no_policy():
    with pytest.raises(PolicyError, match="defines no 'route'"):
        PolicyBook().compile("new", "x = slider(0, 1)")


def test_a_cell_may_shadow_a_built_in_policy():
    book = PolicyBook()
    book.define(
        book.compile("disagg", ROUTE + "    return engines.all.random().complete(request)\n", "cell [1]")
    )
    assert book.get("disagg").origin == "cell [1]"
