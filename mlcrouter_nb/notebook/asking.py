"""`%%ask`: a request whose answer streams under its cell."""

import argparse
import asyncio
import contextlib
import contextvars
import threading

from IPython.core.error import UsageError

from ..cluster import Cluster, Submission
from ..protocol.errors import MlcRouterError
from .arguments import Parser
from .display.answer import AnswerDisplay
from .failures import Interrupted
from .session import Session

TICK = 1 / 30
INTERRUPT_PATIENCE = 0.4  # how long an interrupted cell waits for the engines to have freed the request


def _parser() -> Parser:
    parser = Parser("%%ask", "Ask the cluster; the answer streams under the cell.")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="the most tokens of the answer (default: 128)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="the same answer each time")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat", dest="chat", action="store_true", default=None, help="as a turn of a chat (default)"
    )
    kind.add_argument(
        "--raw", dest="chat", action="store_false", default=None, help="plain completion of the text"
    )
    parser.add_argument("--policy", metavar="NAME", help="for this request only")
    parser.add_argument(
        "--no-wait", action="store_true", help="go on at once; the answer streams here all the same"
    )
    return parser


ASK = _parser()


def ask(session: Session, args: argparse.Namespace, prompt: str) -> None:
    """Submit the request and stream its answer, here or, with `--no-wait`, from a thread of its own."""
    cluster = running(session)
    if not prompt.strip():
        raise UsageError("%%ask needs a question below it.")
    display = AnswerDisplay()
    submission = cluster.submit(
        prompt.rstrip("\n"),
        on_text=display.add,
        chat=args.chat,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        policy=session.book.get(args.policy).name if args.policy else None,
    )
    session.remember(submission)
    if args.no_wait:
        # The context knows the cell: what this thread shows lands there, whatever cell runs by then.
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(follow, session, submission, display), name="mlcrouter-ask", daemon=True
        ).start()
        return
    try:
        while not submission.wait(TICK):
            display.draw(submission.trace)
    except KeyboardInterrupt:
        submission.cancel()
        with contextlib.suppress(KeyboardInterrupt):
            submission.wait(INTERRUPT_PATIENCE)
        display.end(summary(submission, "interrupted"))
        raise Interrupted("the request is stopped; the cluster is up.") from None
    finally:
        session.forget(submission)
    failed = failure(submission)
    display.end(summary(submission, "failed" if failed else "finished"))
    if failed is not None:
        raise failed


def running(session: Session) -> Cluster:
    """The cluster, ready to serve; raises `UsageError`."""
    cluster = session.cluster
    if cluster is None:
        raise UsageError("no cluster is running; %route up boots one.")
    if cluster.status().state == "booting":
        raise UsageError("the cluster is still booting; %route shows how far it is.")
    return cluster


def follow(session: Session, submission: Submission, display: AnswerDisplay) -> None:
    """Draw until the request has ended; errors are shown, since no cell waits to raise them."""
    try:
        while not submission.wait(TICK):
            display.draw(submission.trace)
    finally:
        session.forget(submission)
    error = failure(submission)
    text = "" if error is None else f"{type(error).__name__}: {error}"
    display.end(summary(submission, "failed" if error else "finished"), text)


def failure(submission: Submission) -> MlcRouterError | None:
    """Why a request that has ended failed; a cancelled one says so."""
    try:
        submission.result(0)
    except MlcRouterError as error:
        return error
    except asyncio.CancelledError:
        return MlcRouterError("The request was cancelled.")
    return None


def summary(submission: Submission, state: str) -> str:
    """The line below an answer."""
    return submission.trace.summary() if submission.trace is not None else state
