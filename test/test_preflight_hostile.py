"""python -m xla_fsdp.preflight against servers that lie, lead elsewhere, or never end."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from preflight_command import lines, refusal
from test_preflight import api, key, preflight  # noqa: F401  # fixtures
from tpu_api import discovery, error


class Raw:
    """Answers every request by ``answer(handler)``, and keeps what it was sent."""

    def __init__(self, answer):
        self.headers = []
        self.over = threading.Event()
        raw = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                raw.headers.append(dict(self.headers))
                try:
                    answer(self, raw.over)
                except OSError:  # the client had enough
                    pass

            def log_message(self, *words):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, args=(0.02,)).start()

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


def whole(handler, over):
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"{}")


def endless(handler, over):
    """More and more."""
    handler.send_response(200)
    handler.end_headers()
    while not over.is_set():
        handler.wfile.write(b" " * (1 << 20))


def dripping(handler, over):
    """A byte at a time, each in time."""
    handler.send_response(200)
    handler.end_headers()
    while not over.wait(0.2):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def truncated(handler, over):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"state": ')


def leads_to(url, how):
    """A description of the API, at another place, that has it at ``url``."""
    described = discovery(url if how == "rootUrl" else "http://127.0.0.1:9/")
    methods = described["resources"]["projects"]["resources"]["locations"]["resources"]["nodes"]
    if how == "servicePath":
        described["servicePath"] = url
    if how == "path":
        for method in methods["methods"].values():
            method["path"] = method["flatPath"] = url + method["path"]
    return described


@pytest.mark.parametrize("how", ["rootUrl", "servicePath", "path"])
def test_a_description_does_not_lead_the_token_elsewhere(preflight, api, how):  # noqa: F811
    with Raw(whole) as elsewhere:
        api.description = 200, leads_to(elsewhere.url, how)
        said = refusal(preflight("--retries=0"))
        assert "--api_endpoint" in said and "token" in said
        assert elsewhere.headers == []
        assert "secret" not in said


def redirect(to):
    def answer(handler, over):
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.send_header("Metadata-Flavor", "Google")
        handler.end_headers()

    return answer


def test_redirects_are_not_followed(preflight, api):  # noqa: F811
    with Raw(whole) as elsewhere, Raw(redirect(elsewhere.url)) as door:
        api.description = 200, discovery(api.url)
        done = preflight("--retries=0", "--api_endpoint", door.url)
        assert "302" in refusal(done)
        assert "302" in refusal(preflight("--retries=0", "--discovery_url", door.url))
        assert elsewhere.headers == [] and len(door.headers) == 2


def test_a_metadata_server_that_leads_elsewhere_or_never_ends(preflight):  # noqa: F811
    with Raw(whole) as elsewhere, Raw(redirect(elsewhere.url)) as door, Raw(dripping) as slow:
        for server in (door, slow):
            began = time.monotonic()
            host = server.url.removeprefix("http://").rstrip("/")
            done = preflight(where=(), env={"GCE_METADATA_HOST": host})
            assert "give --zone and --project" in refusal(done)
            assert server.headers and time.monotonic() - began < 15
        assert elsewhere.headers == []


@pytest.mark.parametrize(
    "answer, said",
    [(endless, "more than 16 MiB"), (dripping, "timed out"), (truncated, "IncompleteRead")],
)
@pytest.mark.parametrize("what", ["--discovery_url", "--api_endpoint"])
def test_answers_that_do_not_end_well(preflight, what, answer, said):  # noqa: F811
    with Raw(answer) as server:
        done = preflight("--retries=0", "--api_timeout=1", what, server.url)
        assert said in lines(done, 1)["TPU API"][1]


def test_no_secrets_in_what_is_said(preflight, api):  # noqa: F811
    api.answers = [error(403, f"you sent Bearer {api.token[1]['access_token']}, {'x' * 300}")]
    assert "secret" not in refusal(preflight())
    address = api.url.replace("http://", "http://me:password@")
    said = refusal(preflight("--discovery_url", f"{address}discovery?key=private"))
    assert "it contains a user name" in said and "password" not in said and "private" not in said
    api.description = 404, b""
    said = refusal(preflight("--discovery_url", f"{api.url}discovery?key=private"))
    assert "answered 404" in said and "private" not in said
