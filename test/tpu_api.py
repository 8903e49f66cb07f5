"""python -m xla_fsdp.preflight run as by a user, and a fake TPU API with credentials for it."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import rsa
from web_server import Server, answering

from xla_fsdp.pods import tpu_api
from xla_fsdp.pods.probe import VARIABLES
from xla_fsdp.preflight import main

NODE = "/v2/projects/lab/locations/us-central2-b/nodes/pod"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def node(**changes):
    """A healthy v3-32 as v2 of the API states it; ``None`` removes a key."""
    endpoints = [
        {"ipAddress": f"10.0.0.{n}", "port": 8470, "accessConfig": {"externalIp": f"192.0.2.{n}"}}
        for n in range(4)
    ]
    stated = {
        "name": NODE.removeprefix("/v2/"), "acceleratorType": "v3-32", "state": "READY",
        "health": "HEALTHY", "runtimeVersion": "tpu-ubuntu2204-base",
        "networkEndpoints": endpoints, "schedulingConfig": {}, "apiVersion": "V2",
    }  # fmt: skip
    return {key: value for key, value in (stated | changes).items() if value is not None}


def error(status, message):
    return status, {"error": {"code": status, "message": message, "status": "SOME_STATUS"}}


def _method(name, parameter, pattern, path):
    where = {"type": "string", "required": True, "location": "path", "pattern": pattern}
    return {
        "id": f"tpu.projects.locations.nodes.{name}", "httpMethod": "GET", "path": path,
        "flatPath": path, "parameterOrder": [parameter], "parameters": {parameter: where},
        "response": {"$ref": "Node"},
    }  # fmt: skip


def discovery(root):
    """What the real document says of the two methods that are used."""
    nodes = {
        "get": _method("get", "name", "^projects/[^/]+/locations/[^/]+/nodes/[^/]+$", "v2/{+name}"),
        "list": _method("list", "parent", "^projects/[^/]+/locations/[^/]+$", "v2/{+parent}/nodes"),
    }
    locations = {"locations": {"resources": {"nodes": {"methods": nodes}}}}
    return {
        "kind": "discovery#restDescription", "id": "tpu:v2", "name": "tpu", "version": "v2",
        "rootUrl": root, "servicePath": "", "batchPath": "batch",
        "auth": {"oauth2": {"scopes": {SCOPE: {"description": "all"}}}},
        "schemas": {"Node": {"id": "Node", "type": "object"}},
        "resources": {"projects": {"resources": locations}},
    }  # fmt: skip


class TpuApi(Server):
    """Answers each GET of the node with the next of ``answers``; repeats the last one.

    An answer is a node, ``(status, JSON)`` or ``(status, bytes)``. ``names``: the nodes in the
    zone; ``machine``: the answers of the metadata server, by path.
    """

    def __init__(self):
        self.answers = [node()]
        self.names = ["pod", "other"]
        self.machine = {}
        self.description = None
        self.token = (200, {"access_token": "secret", "expires_in": 3600})
        super().__init__(self._respond)

    def _respond(self, handler, over):
        status, body = self._answer_get(handler.path.partition("?")[0])
        if handler.command == "POST":
            handler.rfile.read(int(handler.headers["Content-Length"]))
            status, body = self.token
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content_Type": "application/json", "Content_Length": str(len(data))}
        if handler.path.startswith("/computeMetadata"):
            headers["Metadata_Flavor"] = "Google"
        answering(data, status, **headers)(handler, over)

    def _answer_get(self, path):
        if path.startswith("/discovery"):
            return self.description or (200, discovery(self.url))
        if path == NODE:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return answer if isinstance(answer, tuple) else (200, answer)
        if path == NODE.rpartition("/")[0]:
            parent = NODE.removeprefix("/v2/").rpartition("/")[0]
            if self.names is None:
                return error(403, "not for you")
            return 200, {"nodes": [{"name": f"{parent}/{name}"} for name in self.names]}
        if path in self.machine:
            return 200, self.machine[path].encode()
        return error(404, "no such path")

    def asked_for_node(self):
        return sum(path.partition("?")[0] == NODE for path, _ in self.asked)


@functools.cache
def _private_key():
    """A new one: a key in the repository, even if useless, would alarm tools that find secrets."""
    return rsa.newkeys(1024)[1].save_pkcs1().decode()


def write_credentials(path, token_url):
    """The key file of a service account whose tokens come from ``token_url``; the path."""
    stated = {"type": "service_account", "client_email": "tester@lab.iam.gserviceaccount.com"}
    stated |= {"private_key_id": "1", "private_key": _private_key(), "token_uri": token_url}
    path.write_text(json.dumps(stated))
    return path


ROOT = Path(__file__).resolve().parent.parent
WHERE = ("--zone", "us-central2-b", "--project", "lab")
PLACE = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "CLOUDSDK_COMPUTE_ZONE")
# No credentials, no proxy and no Google Cloud but what a test gives.
CLEAN = {"GCE_METADATA_HOST": "127.0.0.1:9", "NO_GCE_CHECK": "true"}


def command(api, where, flags):
    return ["--tpu", "pod", *where, "--discovery_url", f"{api.url}discovery", *map(str, flags)]


def environment(key, home):
    return CLEAN | {"HOME": str(home), "GOOGLE_APPLICATION_CREDENTIALS": str(key)}


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def call(monkeypatch, capsys, api, key, home, *flags, env=None, where=WHERE):
    with monkeypatch.context() as patches:
        for name in (*PLACE, *VARIABLES):
            patches.delenv(name, raising=False)
        for name, value in (environment(key, home) | (env or {})).items():
            patches.setenv(name, value)
        patches.setattr(tpu_api, "time", Clock())
        argv = command(api, where, flags)
        capsys.readouterr()
        code = main(argv)
    return subprocess.CompletedProcess(argv, code, *capsys.readouterr())


def start(api, key, home, *flags):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "xla_fsdp.preflight", *command(api, WHERE, flags)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | environment(key, home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(began):
    with began:
        try:
            # Minutes more than any of it takes: only what waits forever comes to the end of them.
            said = began.communicate(timeout=1500)
        finally:
            began.kill()
    return subprocess.CompletedProcess(began.args, began.returncode, *said)


def wait_until(ready, began):
    while began.poll() is None and not ready():
        time.sleep(0.05)


def lines(done, code):
    """The status and text of each check, by name; the command ended with ``code``, as it should."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    checks = done.stdout.splitlines()[:-1]
    return {line[9:29].strip(): (line[:8].strip(), line[30:]) for line in checks}


def refusal(done):
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line
