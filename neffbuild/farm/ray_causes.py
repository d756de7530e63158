"""Why units fail on a Ray cluster that would not fail in processes of one host."""

from __future__ import annotations

from neffbuild.farm.outcomes import Cause, CauseKind, lost_worker

NODE_OUT_OF_MEMORY = Cause(
    CauseKind.OUT_OF_MEMORY,
    "Ray ended the unit because its node ran out of memory",
    "use nodes with more memory, or set `farm.memory` so that fewer units share one",
)


def no_node(shortfall: str) -> Cause:
    """No living node could hold the unit."""
    return Cause(
        CauseKind.REFUSED,
        f"no node of the Ray cluster can take the unit: {shortfall}",
        "add such a node, or lower `farm.memory` or `farm.resources`; where nodes join when they are "
        "asked for, set `farm.node_wait`",
    )


def node_refuses(text: str) -> Cause:
    """A node is not what the plan was made for."""
    return Cause(
        CauseKind.REFUSED, text, "install the driver's neffbuild and toolchain on every node"
    )


def node_fails(error: BaseException) -> Cause:
    """The task raised what it should not. What Ray makes of an exception ends with the exception
    itself, below its traceback."""
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return node_refuses(f"a node failed before the compile: {last}")


def lost_machines(starts: int, error: BaseException) -> Cause:
    """Every node that the unit was started on was lost, or its Ray worker process."""
    kind = type(error).__name__
    return lost_worker(f"lost machine: started {starts} times and lost each time ({kind})")


def not_shared(url: str) -> Cause:
    """What a node has stored is not there."""
    return Cause(
        CauseKind.STORE,
        f"a node has stored the unit in {url}, but it is not there as seen from here",
        "name a store that every node reaches by the same URL: s3://BUCKET/PREFIX, or a folder of a "
        "file system that all of them mount",
    )
