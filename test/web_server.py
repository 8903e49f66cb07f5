"""Servers on this machine that answer what a test says."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Answers every request by ``answer(handler, over)``; ``over`` is set when the server ends.

    ``asked``: path and headers of each GET, in order.
    """

    def __init__(self, answer):
        self.asked = []
        self._over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append((self.path, self.headers))
                self.do_POST()

            def do_POST(self):
                with contextlib.suppress(OSError):  # the client had enough
                    answer(self, server._over)

            def log_message(self, *words):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True  # closing does not wait for an answer that nobody reads
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.host}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def answering(body=b"", status=200, piece=b"", pause=0.0, **headers):
    """Answers with ``body``, then with a ``piece`` after each ``pause``, without an end. Without a
    status ``body`` is all that is sent before."""

    def answer(handler, over):
        if status is not None:
            handler.send_response(status)
            for name, value in headers.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.end_headers()
        handler.wfile.write(body)
        while piece and not over.wait(pause):
            handler.wfile.write(piece)
            handler.wfile.flush()

    return answer
