"""What one notebook has: its policies, the running cluster, its panel, the answers that still stream."""

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cluster import Cluster, Submission, current
from ..protocol.errors import ArgumentError
from ..router.policy import Policy, PolicyBook
from ..telemetry import PolicyView
from .config import MlcRouter

if TYPE_CHECKING:
    from .panel import Panel

DEEPEST_UNDO = 100


@dataclass(frozen=True)
class Before:
    """What a change began with: the active policy and its values, and the policy whose name another one took."""

    policy: Policy | None
    values: dict[str, Any]
    replaced: Policy | None = None


class Session:
    """Policies are kept across clusters: one that is chosen before the cluster is up holds once it is."""

    def __init__(self, config: MlcRouter | None = None) -> None:
        self.config = config or MlcRouter()
        self.panel: Panel | None = None
        self._book = PolicyBook()
        self._chosen: Policy | None = None
        self._past: list[Before] = []
        self._running: set[Submission] = set()
        self._lock = threading.Lock()

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that runs or boots in this process, whoever started it."""
        return current.find()

    def let_go(self, patience: float = 20.0) -> None:
        """Wait until a cluster that is stopping has gone, so that another one can boot."""
        deadline = time.monotonic() + patience
        while (cluster := self.cluster) is not None and time.monotonic() < deadline:
            if cluster.status().state not in ("stopping", "stopped"):
                return
            time.sleep(0.05)

    @property
    def book(self) -> PolicyBook:
        """The policies: the running cluster's, else those that the next cluster will get."""
        cluster = self.cluster
        return self._book if cluster is None else cluster.book

    @property
    def active(self) -> Policy | None:
        """The policy that serves, or the one chosen for the next cluster."""
        cluster = self.cluster
        if cluster is not None and (view := cluster.status().policy) is not None:
            return cluster.book.get(view.name)
        return self._chosen

    def view(self) -> PolicyView | None:
        """What to show of the active policy."""
        cluster = self.cluster
        if cluster is not None and (view := cluster.status().policy) is not None:
            return view
        return self._chosen.view() if self._chosen is not None else None

    def new_cluster(self, model: str, **options: Any) -> Cluster:
        """A cluster that is not started yet, with this notebook's policies; `policy` overrides the chosen one."""
        name = options.pop("policy", None)
        chosen = self._book.get(name) if name else self._chosen
        values = dict(chosen.values) if chosen is not None else {}
        return Cluster(model, policy=chosen, parameters=values, book=self._book, **options)

    def catch_up(self, cluster: Cluster) -> None:
        """Make active what was chosen while the cluster booted."""
        view, chosen = cluster.status().policy, self._chosen
        if chosen is not None and view is not None and cluster.book.get(view.name) is not chosen:
            cluster.use(chosen)

    def use(self, policy: Policy, values: dict[str, Any], *, define: bool = False) -> None:
        """Make a policy active, and with `define` known by its name; where anything is wrong the old one goes on serving."""
        before = self._remembered(replaced=self.known(policy.name) if define else None)
        cluster = self.cluster
        if cluster is not None and serves(cluster):
            cluster.use(policy, **values)
        else:
            policy.set(**values)
        if define:
            self._define(policy)
        self._chosen = policy
        self._past.append(before)

    def set(self, values: dict[str, Any]) -> None:
        """Set parameters of the active policy; raises `ArgumentError`."""
        active, cluster = self.active, self.cluster
        if active is None:
            raise ArgumentError(
                "no policy is active yet: choose one with %route use NAME, or boot with %route up."
            )
        before = self._remembered()
        if cluster is not None and serves(cluster):
            cluster.set(**values)
        else:
            active.set(**values)
        self._past.append(before)

    def undo(self) -> None:
        """Go back to what was active before the last `use`, `set` or cell; raises `ArgumentError`."""
        if not self._past:
            raise ArgumentError("there is nothing to undo.")
        before = self._past[-1]
        policy = before.policy or (before.replaced if self.cluster is not None else None)
        if policy is not None:
            self.use(policy, before.values if policy is before.policy else {}, define=True)
            self._past.pop()
        elif self.cluster is not None:
            raise ArgumentError("there is nothing to undo: no policy was active before.")
        else:
            self._chosen = None
        if before.replaced is not None:
            self._define(before.replaced)
        self._past.pop()

    def known(self, name: str) -> Policy | None:
        """The policy of that name, if there is one."""
        return self.book.get(name) if name in self.book.names() else None

    def remember(self, submission: Submission) -> None:
        """An answer streams; it is stopped when the extension is unloaded."""
        with self._lock:
            self._running.add(submission)

    def forget(self, submission: Submission) -> None:
        """An answer has ended."""
        with self._lock:
            self._running.discard(submission)

    def close(self) -> None:
        """Close the panel, stop the answers and the cluster, and say so."""
        if self.panel is not None:
            self.panel.close()
            self.panel = None
        with self._lock:
            running = list(self._running)
        for submission in running:
            submission.cancel()
        if self.cluster is not None:
            print("mlcrouter_nb is unloaded; its cluster is being stopped ...")
            while (cluster := self.cluster) is not None:
                cluster.down_blocking()
            print("The cluster is stopped.")

    def _define(self, policy: Policy) -> None:
        for book in {id(book): book for book in (self._book, self.book)}.values():
            book.define(policy)

    def _remembered(self, replaced: Policy | None = None) -> Before:
        """What is active now, for `undo`."""
        active = self.active
        del self._past[:-DEEPEST_UNDO]
        return Before(active, dict(active.values) if active is not None else {}, replaced)


def serves(cluster: Cluster) -> bool:
    """Whether a policy can be made active now; before, it is chosen for later."""
    return cluster.status().state == "ready"
