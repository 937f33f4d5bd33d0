"""`%%ask`: a request whose answer streams under its cell."""

import argparse
import asyncio
import contextlib
import contextvars
import threading
from typing import Any

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
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest, P together")
    parser.add_argument("--seed", type=int, metavar="N", help="the same answer each time")
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help=r"end before this text (\n: a line's end); may come again",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system's message of the chat, in quotes")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat", dest="chat", action="store_true", default=None, help="as a turn of a chat (default)"
    )
    kind.add_argument(
        "--raw", dest="chat", action="store_false", default=None, help="plain completion of the text"
    )
    parser.add_argument("--policy", metavar="NAME", help="for this request only")
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="go on at once; the answer streams here all the same (in a terminal: comes as a whole once it is complete)",
    )
    return parser


ASK = _parser()


def ask(session: Session, args: argparse.Namespace, prompt: str) -> None:
    """Submit the request and stream its answer, here or, with `--no-wait`, from a thread of its own."""
    cluster = running(session)
    if not prompt.strip():
        raise UsageError("%%ask needs a question below it.")
    options = request_options(session, args, prompt.rstrip("\n"))
    display = AnswerDisplay(whole=args.no_wait)
    submission = cluster.submit(on_text=display.add, **options)
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
        stopped = False
        with contextlib.suppress(KeyboardInterrupt):
            stopped = submission.wait(INTERRUPT_PATIENCE)
        if not stopped:
            display.end("interrupted")
            raise Interrupted(why_no_answer(cluster)) from None
        display.end(summary(submission, "interrupted"))
        raise Interrupted("the request is stopped; the cluster is up.") from None
    finally:
        session.forget(submission)
    failed = failure(submission)
    display.end(summary(submission, "failed" if failed else "finished"))
    if failed is not None:
        raise failed


def request_options(session: Session, args: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """What `Cluster.submit` is given; raises `UsageError` for options that exclude each other."""
    options = {name: getattr(args, name) for name in ("max_tokens", "temperature", "top_p", "seed", "chat")}
    options["stop"] = [text.replace("\\n", "\n") for text in args.stop] if args.stop else None
    options["policy"] = session.book.get(args.policy).name if args.policy else None
    if args.system is None:
        return {"prompt": prompt, **options}
    if args.chat is False:
        raise UsageError("%%ask: --system belongs to a chat; leave out --raw, or write it into the text.")
    system = {"role": "system", "content": args.system}
    return {"messages": [system, {"role": "user", "content": prompt}], **options}


def why_no_answer(cluster: Cluster) -> str:
    """What is known where a request does not end although it was cancelled."""
    try:
        blocked = cluster.loop_thread.blocked
    except MlcRouterError:
        return "the cluster has been stopped meanwhile."
    return blocked or (
        "the router has not confirmed yet that the request is stopped; %route shows how it is, "
        "%route down stops the cluster."
    )


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
