"""What only a collector asks of a bucket: removing many objects at once, and uploads in parts that nobody
completed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from neffbuild.cache.s3.connection import Refusal, S3Connection
from neffbuild.cache.s3.errors import Expected
from neffbuild.cache.s3.writes import delete

_BATCH = 1000
_AT_ONCE = 8
_REFUSED = {Expected.UNSUPPORTED, Expected.FORBIDDEN, Expected.MISSING, Expected.NO_UPLOAD}


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts that was begun and not completed; `begun` in epoch seconds, by the server."""

    key: str
    id: str
    begun: float


def delete_objects(s3: S3Connection, keys: Sequence[str]) -> None:
    """Remove objects by the thousand, or one by one where the server does not know how."""
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        named = {"Objects": [{"Key": key} for key in batch], "Quiet": True}
        answer = s3.call("DeleteObjects", expect=_REFUSED, Delete=named)
        if isinstance(answer, Refusal):
            left = list(batch)
        else:
            # Each failed one once more by itself: it may have been throttled, or says why it cannot go.
            left = [error["Key"] for error in answer.get("Errors", ())]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="s3-delete") as pool:
            for _ in pool.map(partial(delete, s3), left):
                pass


def unfinished_uploads(s3: S3Connection, prefix: str) -> Iterator[Upload]:
    """Uploads in parts below a prefix; none where the server does not list them."""
    after: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    while True:
        page = s3.call("ListMultipartUploads", expect=_REFUSED, Prefix=prefix, **after)
        if isinstance(page, Refusal):
            return
        for one in page.get("Uploads", ()):
            upload = (one["Key"], one["UploadId"])
            # A prefix is a hint that some servers do not take.
            if one["Key"].startswith(prefix) and upload not in seen:
                seen.add(upload)
                yield Upload(*upload, one["Initiated"].timestamp())
        follows = {
            "KeyMarker": page.get("NextKeyMarker"),
            "UploadIdMarker": page.get("NextUploadIdMarker"),
        }
        following = {name: marker for name, marker in follows.items() if marker}
        if not page.get("IsTruncated") or following == after:
            return
        after = following


def abort_upload(s3: S3Connection, key: str, upload_id: str) -> None:
    """Remove an upload's parts; one that is gone already is no error."""
    s3.call(
        "AbortMultipartUpload",
        key,
        expect={Expected.MISSING, Expected.NO_UPLOAD},
        UploadId=upload_id,
    )
