"""A store in an S3 bucket, or in whatever speaks S3. Needs the `s3` extra.

`options` is what the URL says, `connection` sends requests and retries them, `errors` says what went
wrong, `listing` finds many objects with few requests, `writes` creates and replaces documents safely
on any server, `blobs` streams compressed blobs, `store` puts them together.
"""

from neffbuild.cache.s3.options import S3Options
from neffbuild.cache.s3.store import S3Store

__all__ = ["S3Options", "S3Store"]
