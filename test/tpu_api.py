"""A stand-in for the TPU API on this machine, with a token server and credentials for it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import rsa

NODE = "/v2/projects/lab/locations/us-central2-b/nodes/pod"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def node(**changes):
    """A healthy v3-32 as v2 of the API states it; ``None`` removes a key."""
    stated = {
        "name": NODE.removeprefix("/v2/"),
        "acceleratorType": "v3-32",
        "state": "READY",
        "health": "HEALTHY",
        "runtimeVersion": "tpu-ubuntu2204-base",
        "networkEndpoints": [
            {
                "ipAddress": f"10.0.0.{worker}",
                "port": 8470,
                "accessConfig": {"externalIp": f"192.0.2.{worker}"},
            }
            for worker in range(4)
        ],
        "schedulingConfig": {},
        "apiVersion": "V2",
    }
    return {key: value for key, value in (stated | changes).items() if value is not None}


def error(status, message):
    """An error as Google's APIs state it."""
    return status, {"error": {"code": status, "message": message, "status": "SOME_STATUS"}}


def _method(name, parameter, pattern, path):
    return {
        "id": f"tpu.projects.locations.nodes.{name}",
        "httpMethod": "GET",
        "path": path,
        "flatPath": path,
        "parameterOrder": [parameter],
        "parameters": {
            parameter: {"type": "string", "required": True, "location": "path", "pattern": pattern}
        },
        "response": {"$ref": "Node" if name == "get" else "ListNodesResponse"},
        "scopes": [SCOPE],
    }


def discovery(root):
    """What the real document says of the two methods that are used."""
    nodes = {
        "get": _method("get", "name", "^projects/[^/]+/locations/[^/]+/nodes/[^/]+$", "v2/{+name}"),
        "list": _method("list", "parent", "^projects/[^/]+/locations/[^/]+$", "v2/{+parent}/nodes"),
    }
    return {
        "kind": "discovery#restDescription",
        "id": "tpu:v2",
        "name": "tpu",
        "version": "v2",
        "rootUrl": root,
        "servicePath": "",
        "batchPath": "batch",
        "auth": {"oauth2": {"scopes": {SCOPE: {"description": "all"}}}},
        "schemas": {
            "Node": {"id": "Node", "type": "object", "properties": {"state": {"type": "string"}}},
            "ListNodesResponse": {
                "id": "ListNodesResponse",
                "type": "object",
                "properties": {"nodes": {"type": "array", "items": {"$ref": "Node"}}},
            },
        },
        "resources": {
            "projects": {"resources": {"locations": {"resources": {"nodes": {"methods": nodes}}}}}
        },
    }


class TpuApi:
    """Answers each GET of the node with the next of ``answers``, and the last one ever after.

    An answer is a node, ``(status, JSON)`` or ``(status, bytes)``. ``names`` are of the nodes in
    the zone, ``machine`` what the metadata server of a machine of that project says. ``asked`` are
    the paths that were, in order; ``tokens`` what came with them.
    """

    def __init__(self):
        self.answers = [node()]
        self.names = ["pod", "other"]
        self.machine = {}
        self.description = None
        self.token = (200, {"access_token": "secret", "expires_in": 3600})
        self.asked = []
        self.tokens = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                api.asked.append(self.path.partition("?")[0])
                api.tokens.append(self.headers.get("Authorization"))
                self.send(*api.answer(self.path))

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send(*api.token)

            def send(self, status, body):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if self.path.startswith("/computeMetadata"):
                    self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def answer(self, path):
        if path.startswith("/discovery"):
            return self.description or (200, discovery(self.url))
        if path.partition("?")[0] == NODE:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return answer if isinstance(answer, tuple) else (200, answer)
        if path.partition("?")[0] == NODE.rpartition("/")[0]:
            parent = NODE.removeprefix("/v2/").rpartition("/")[0]
            if self.names is None:
                return error(403, "not for you")
            return 200, {"nodes": [{"name": f"{parent}/{name}"} for name in self.names]}
        if path in self.machine:
            return 200, self.machine[path].encode()
        return error(404, "no such path")

    def asked_for_node(self):
        return self.asked.count(NODE)

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def write_credentials(path, token_url):
    """The key file of a service account whose tokens come from ``token_url``."""
    # LazyState anew: a key in a repository, even a useless one, alarms whoever searches for keys.
    _, key = rsa.newkeys(1024)
    path.write_text(
        json.dumps(
            {
                "type": "service_account",
                "client_email": "tester@lab.iam.gserviceaccount.com",
                "private_key_id": "1",
                "private_key": key.save_pkcs1().decode(),
                "token_uri": token_url,
            }
        )
    )
