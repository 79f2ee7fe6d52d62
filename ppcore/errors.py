"""Errors, named by whose fault they are.

Texts are lower case, facts first, values with ``!r``; each ends where a reader can act.
The symptom page of the documentation is keyed by these classes.
"""

from __future__ import annotations

import builtins


class PPError(Exception):
    """Anything that this package raises on purpose."""


class BlockError(PPError):
    """The traced block asked for something that cannot be done."""


class Diverged(BlockError):
    """The same block ran differently on two ranks.

    Every rank runs every block; control flow that depends on the rank (its id, its clock, an
    unseeded random number) makes access ``n`` of a worker mean different things on different
    ranks, and then nothing can be matched any more.
    """


class Unreachable(BlockError):
    """A value was pulled that its owner can no longer produce."""


class Missed(BlockError):
    """A write came too late: its value was produced by a later stage in the same turn."""


class BlockTimeout(BlockError):
    """The block ran for too long without touching the model: an endless loop, most likely."""


class PeerError(PPError):
    """Another rank broke the protocol, or died."""


class PeerDied(PeerError):
    """The link to another rank is gone."""


class DeadlineExceeded(PeerError):
    """A wait outlasted its deadline; the text says who waits for what, where, since when."""


class SetupError(PPError):
    """The environment or the engine's settings do not allow pipeline-parallel tracing."""


def refusal(reason: str) -> Exception:
    """The error of a pull that was refused, from what the core was told: ``kind: text``.

    What evaluating raised on the owner (``failed``) is what it would have raised here. Only Python's own
    exceptions keep their type; torch raises no others.
    """
    kind, _, text = reason.partition(": ")
    if kind == "failed":
        name, _, message = text.partition(": ")
        raised = getattr(builtins, name, None)
        if isinstance(raised, type) and issubclass(raised, Exception):
            return raised(message)
    return {"diverged": Diverged, "died": PeerDied}.get(kind, Unreachable)(text)
