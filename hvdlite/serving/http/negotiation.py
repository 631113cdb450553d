"""What clients say in their headers of formats, content codings and keys."""

from __future__ import annotations

import gzip
import hmac
import zlib
from collections.abc import Sequence

GZIP = b"gzip"


def preferred(accept: str, offered: Sequence[str], otherwise: str) -> str | None:
    """Return the format that a header ``Accept`` likes best (RFC 9110, section 12.5.1); None if it takes none of them.

    Args:
        accept: The value of the header.
        offered: The formats that there are.
        otherwise: The one of them that is taken if it is as good as the best, and none of these is named.
    """
    weights = _weights(accept)

    def weight(kind: str) -> float:
        ranges = (kind, f"{kind.partition('/')[0]}/*", "*/*")
        return next((weights[each] for each in ranges if each in weights), 0.0)

    best = max(map(weight, offered))
    if best <= 0:
        return None
    named = [kind for kind in weights if kind in offered and weight(kind) == best]
    as_good = named or [kind for kind in (otherwise, *offered) if weight(kind) == best]
    return as_good[0]


def takes_gzip(accepted: bytes) -> bool:
    """Return whether a header ``Accept-Encoding`` allows gzip."""
    weights = _weights(accepted.decode("latin-1"))
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def deflate(data: bytes) -> bytes:
    """Return bytes compressed by gzip."""
    return gzip.compress(data, 1, mtime=0)


def inflate(data: bytes | bytearray, limit: int) -> bytes:
    """Return what gzip has compressed, but no more than one byte over the limit.

    Raises:
        ValueError: It is no gzip, or is not whole.
    """
    decompressor = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        found = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(f"the Content-Encoding is gzip, and the body is none: {error}.") from None
    if len(found) <= limit and (not decompressor.eof or decompressor.unused_data):
        raise ValueError("the Content-Encoding is gzip, and the body is cut off, or has something behind its end.")
    return found


def shows_key(headers: dict[bytes, bytes], key: str) -> bool:
    """Return whether a request shows a key, as ``X-API-Key: KEY`` or ``Authorization: Bearer KEY``."""
    scheme, _, shown = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() != b"bearer":  # the name of a scheme is in any case (RFC 9110, section 11.1)
        shown = b""
    return hmac.compare_digest(headers.get(b"x-api-key") or shown.strip(), key.encode())


def _weights(accepted: str) -> dict[str, float]:
    """Return the weight of each name in a header such as ``a;q=0.5, b``."""
    weights: dict[str, float] = {}
    for part in accepted.split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        weight = 1.0
        for each in parameters:
            if each.replace(" ", "").startswith("q="):
                try:
                    weight = float(each.replace(" ", "")[2:])
                except ValueError:
                    weight = 0.0
        weights.setdefault(name, weight)
    return weights
