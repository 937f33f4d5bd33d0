import asyncio

import pytest

from mlcrouter_nb.protocol.errors import ArgumentError
from mlcrouter_nb.router.parameters import choice, slider, switch
from mlcrouter_nb.router.policy import compile_policy


def test_values_and_ranges():
    assert slider(0.0, 1.0).value == 0.0
    assert slider(0, 10, value=3).check("n", 4.0) == 4
    assert isinstance(slider(0.0, 1.0).check("f", 1), float)
    assert choice(["a", "b"]).value == "a"
    assert switch(True).value is True


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: slider(1, 1), "empty"),
        (lambda: slider(0, 1, value=2), "between 0 and 1"),
        (lambda: slider(0, 1, step=0), "above 0"),
        (lambda: slider("a", 1), "numbers"),
        (lambda: slider(0.0, float("nan")), "numbers"),
        (lambda: slider(0, 10).check("n", 1.5), "whole"),
        (lambda: slider(0.0, 1.0).check("f", True), "a number"),
        (lambda: slider(0.0, 1.0).check("f", 1.2), "f is 1.2"),
        (lambda: choice([]), "at least one"),
        (lambda: choice(["a"], value="b"), "one of 'a'"),
        (lambda: switch(1), "True or False"),
    ],
)
def test_wrong_ones_are_named(make, says):
    with pytest.raises(ArgumentError, match=says):
        make()


def test_value_is_keyword_only():
    with pytest.raises(TypeError):
        slider(0, 1, 0.5)  # type: ignore[misc]


SOURCE = """
limit = slider(0, 100, value=1)
mode = choice(["fast", "slow"])
on = switch(False)
count = 0

def helper():
    return [limit for _ in range(2)]

class Reader:
    def read(self):
        return limit

async def route(request, engines):
    global count
    count += 1
    before = limit
    await request()
    child = await asyncio.create_task(later())
    return before, limit, helper(), Reader().read(), (lambda: limit)(), child, mode, on, count

async def later():
    await asyncio.sleep(0)
    return limit
"""


async def test_all_code_of_a_cell_sees_the_values_of_its_request():
    policy = compile_policy("p", SOURCE, "cell [1]")

    async def run(gate: asyncio.Event):
        return await policy.start(gate.wait, None, policy.values)

    first_gate, second_gate = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(run(first_gate))
    await asyncio.sleep(0)
    policy.set(limit=2, mode="slow")
    second = asyncio.create_task(run(second_gate))
    await asyncio.sleep(0)
    policy.set(limit=3)
    first_gate.set()
    second_gate.set()
    assert await first == (1, 1, [1, 1], 1, 1, 1, "fast", False, 2)
    assert await second == (2, 2, [2, 2], 2, 2, 2, "slow", False, 2)


def test_set_is_all_or_nothing():
    policy = compile_policy("p", SOURCE)
    with pytest.raises(ArgumentError, match="between 0 and 100"):
        policy.set(on=True, limit=200)
    assert policy.values == {"limit": 1, "mode": "fast", "on": False}
    with pytest.raises(ArgumentError, match=r"no parameter 'lim'; it has: limit, mode, on"):
        policy.set(lim=1)
