"""The texts of errors for ranks that do not agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite.errors import MismatchError, ranks_text
from hvdlite.operations import Signature, describe, why_absent_refused
from hvdlite.operations.negotiation.messages import JOIN, Key
from hvdlite.ranks.together import variants_text


def name_of(key: Key) -> str:
    """Return a key in words, for messages."""
    if key == JOIN:
        return "join()"
    return repr(key) if isinstance(key, str) else f"unnamed operation {key}"


def why_not_done(key: Key, variants: Mapping[Signature, Sequence[int]], size: int) -> str | None:
    """Return why an operation cannot run, or None if it can.

    Some ranks have submitted it with other signatures, or have joined and not submitted it.

    Args:
        key: The key of the operation.
        variants: For each signature the ranks that have submitted it.
        size: The number of ranks.
    """
    if len(variants) > 1:
        return mismatch_text(key, variants)
    ((signature, ranks),) = variants.items()
    joined = sorted(set(range(size)).difference(ranks))
    why = why_absent_refused(signature, joined)
    return None if why is None else joined_text(key, signature, joined, why)


def mismatch_text(key: Key, variants: Mapping[Signature, Sequence[int]]) -> str:
    """Return the text of a mismatch: which ranks submitted which signature under one key."""
    ordered = sorted(variants.items(), key=lambda variant: min(variant[1]))
    first = _first_difference([signature for signature, _ in ordered])
    lines = [f"  {ranks_text(ranks)}: {describe(signature, first)}" for signature, ranks in ordered]
    return f"the ranks do not agree on {name_of(key)}:\n" + "\n".join(lines)


def joined_text(key: Key, signature: Signature, joined: Sequence[int], why: str) -> str:
    """Return the text for an operation that cannot run because the ranks `joined` have joined."""
    verb = "has" if len(joined) == 1 else "have"
    return (
        f"{name_of(key)} {describe(signature)} cannot be done, because {ranks_text(joined)} {verb} joined and {why}: do it "
        "before any rank calls join(), or after join() has returned."
    )


def _first_difference(signatures: Sequence[Signature]) -> int:
    """Return the index of the first tensor that differs between the signatures."""
    tensors = [signature[1] for signature in signatures]
    shortest = min(map(len, tensors))
    return next((n for n in range(shortest) if len({each[n] for each in tensors}) > 1), shortest)


def deadlock_text(pending: Mapping[int, Sequence[tuple[Key, Signature]]]) -> str:
    """Return the text of a deadlock: which rank waits for which operations."""
    lines = []
    for rank in sorted(pending):
        waiting = [
            name_of(key) if key == JOIN else f"{name_of(key)} {describe(signature)}"
            for key, signature in pending[rank][:3]
        ]
        more = f" and {len(pending[rank]) - 3} more" if len(pending[rank]) > 3 else ""
        lines.append(f"  rank {rank} waits for {', '.join(waiting)}{more}")
    return "every rank waits for an operation that another rank has not submitted, so none can go on:\n" + "\n".join(
        lines
    )


def compare_settings(ranks: Sequence[int], settings: Sequence[list[str]]) -> None:
    """Raise unless the ranks' optimizers are of one class and have the same settings.

    Args:
        ranks: The world ranks.
        settings: Lines with the class and the settings of each rank's optimizer.

    Raises:
        MismatchError: They differ; the text shows the first difference.
    """
    if any(each != settings[0] for each in settings):
        lines = [[*each, "no more settings"] for each in settings]
        raise MismatchError(
            f"the ranks have different optimizers:\n{variants_text(ranks, lines)}\nMake them alike on all ranks: their "
            "steps are not the same."
        )
