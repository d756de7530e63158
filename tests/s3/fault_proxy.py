"""A proxy before an S3 server that records every request and misbehaves as it is told."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from s3_servers import S3Server


@dataclass(frozen=True)
class Request:
    """A request as it came; header names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def key(self) -> str:
        """The object key, without the bucket; empty for a request about the bucket."""
        return urlsplit(self.target).path.lstrip("/").partition("/")[2]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and not self.key

    def without(self, *names: str) -> Request:
        return replace(self, headers={k: v for k, v in self.headers.items() if k not in names})


@dataclass(frozen=True)
class Answer:
    """A response. `keep` sends so many bytes of the body and then breaks the connection; nothing at all
    is sent, not even a status, when it is negative."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    keep: int | None = None


Forward = Callable[[Request], Answer]
Act = Callable[[Request, Forward], Answer]


@dataclass
class _Fault:
    act: Act
    matches: Callable[[Request], bool]
    times: int | None
    until: float


@dataclass
class FaultProxy:
    """`requests` is what arrived, in order."""

    upstream: S3Server
    endpoint: str = ""
    requests: list[Request] = field(default_factory=list)
    _faults: list[_Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def server(self) -> S3Server:
        return S3Server(self.endpoint)

    def misbehave(
        self,
        act: Act,
        when: Callable[[Request], bool] = lambda _: True,
        *,
        times: int | None = None,
        seconds: float = 3600.0,
    ) -> None:
        """From now on act so on requests that match, so many times and for so long."""
        self._faults.append(_Fault(act, when, times, time.monotonic() + seconds))

    def behave(self) -> None:
        """No more faults, and a fresh record."""
        self._faults.clear()
        self.requests.clear()

    def counted(self) -> dict[str, int]:
        """How many requests of each kind arrived."""
        counts: dict[str, int] = {}
        for request in self.requests:
            kind = "LIST" if request.is_listing else request.method
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def answer(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            fault = next((one for one in self._faults if self._applies(one, request)), None)
            if fault is not None and fault.times is not None:
                fault.times -= 1
        if fault is None:
            return self._forward(request)
        return fault.act(request, self._forward)

    def _applies(self, fault: _Fault, request: Request) -> bool:
        return fault.times != 0 and time.monotonic() < fault.until and fault.matches(request)

    def _forward(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection(urlsplit(self.upstream.endpoint).netloc, timeout=60)
        try:
            # The Host that was signed, not ours.
            connection.putrequest(
                request.method, request.target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers.items():
                if name not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(request.body)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            body = response.read()
        finally:
            connection.close()
        for name in ("connection", "transfer-encoding", "date", "server"):
            headers.pop(name, None)
        return Answer(response.status, headers, body)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.proxy.answer(Request(self.command, self.path, headers, body))
        if answer.keep is not None and answer.keep < 0:
            self._reset()
            return
        self.send_response_only(answer.status)
        headers = {"date": formatdate(usegmt=True), **answer.headers}
        headers.setdefault("content-length", str(len(answer.body)))
        if answer.status == 204:
            del headers["content-length"]
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: answer.keep])
        if answer.keep is not None:
            self.wfile.flush()
            time.sleep(0.2)  # a reset also discards what the client has not read yet
            self._reset()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def _reset(self) -> None:
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # connections that we, or the client, broke on purpose


@contextmanager
def fault_proxy(upstream: S3Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with _Server(("127.0.0.1", 0), handler) as server:
        proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()


def refuse(status: int, code: str, message: str = "no", **headers: str) -> Act:
    """Answer with an S3 error, without asking the server."""
    return lambda request, forward: Answer(status, headers, _error_xml(code, message))


def slow_down_in_200(request: Request, forward: Forward) -> Answer:
    """Throttled, says the body; all is well, says the status."""
    headers = {"content-type": "application/xml", "etag": '"0"'}
    return Answer(200, headers, _error_xml("SlowDown", "Please reduce your request rate."))


def done_but_slow_down_in_200(request: Request, forward: Forward) -> Answer:
    """The same, after the request has taken effect."""
    forward(request)
    return slow_down_in_200(request, forward)


def lose_answer(request: Request, forward: Forward) -> Answer:
    """The request takes effect; nobody learns of it."""
    return replace(forward(request), keep=-1)


def reset_after(size: int) -> Act:
    """Break the connection after so many bytes of the body."""
    return lambda request, forward: replace(forward(request), keep=size)


def reset_midway(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    return replace(answer, keep=len(answer.body) // 2)


def cut_to(size: int) -> Act:
    """A shorter body whose Content-Length fits it."""

    def act(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        body = answer.body[:size]
        return replace(answer, body=body, headers={**answer.headers, "content-length": str(size)})

    return act


def ignore(*names: str) -> Act:
    """Drop headers before the server sees them. Only before a server that checks no signature."""
    return lambda request, forward: forward(request.without(*names))


def skewed_clock(seconds: float) -> Act:
    """A server whose clock differs so much that it refuses."""

    def act(request: Request, forward: Forward) -> Answer:
        headers = {"date": formatdate(time.time() + seconds, usegmt=True)}
        message = "The difference between the request time and the current time is too large."
        return Answer(403, headers, _error_xml("RequestTimeTooSkewed", message))

    return act


def never_truncated(request: Request, forward: Forward) -> Answer:
    """A page of a listing that claims to be the last."""
    answer = forward(request)
    body = answer.body.replace(b"<IsTruncated>true", b"<IsTruncated>false")
    body = re.sub(rb"<NextContinuationToken>.*?</NextContinuationToken>", b"", body)
    return _with_body(answer, body)


def always_first_page(request: Request, forward: Forward) -> Answer:
    """The first page again and again, always with more to come."""
    target = re.sub(r"&?start-after=[^&]*", "", request.target)
    target = re.sub(r"max-keys=[0-9]+", "max-keys=10", target)
    answer = forward(replace(request, target=target))
    body = answer.body.replace(b"<IsTruncated>false", b"<IsTruncated>true")
    return _with_body(answer, body)


def short_pages(size: int) -> Act:
    """Pages shorter than asked for, as S3 may make them."""

    def act(request: Request, forward: Forward) -> Answer:
        target = re.sub(r"max-keys=[0-9]+", f"max-keys={size}", request.target)
        return forward(replace(request, target=target))

    return act


def _with_body(answer: Answer, body: bytes) -> Answer:
    headers = {**answer.headers, "content-length": str(len(body))}
    return replace(answer, body=body, headers=headers)


def _error_xml(code: str, message: str) -> bytes:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    ).encode()
