"""A policy that never gives way is found by its line."""

import threading
import time

from mlcrouter_nb.router.policy import compile_policy
from mlcrouter_nb.router.watchdog import blocked

SPIN = """
go_on = [True]

async def route(request, engines):
    helper()

def helper():
    while go_on[0]: pass
"""


def test_another_thread_sees_the_line_that_blocks():
    policy = compile_policy("spin", SPIN, "cell [7]")
    routed = policy.start(None, None, {})

    def run():
        try:
            routed.send(None)
        except StopIteration:
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        time.sleep(0.05)
        said = blocked(thread.ident)
    finally:
        routed.cr_frame.f_globals["go_on"][0] = False
        thread.join(5)
    assert said is not None and "policy 'spin', line 8, blocks the router" in said
    assert blocked(threading.get_ident()) is None
