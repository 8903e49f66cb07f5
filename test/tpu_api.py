"""A fake TPU API on this machine, with a token server and credentials for it."""

import json

import rsa
from web_server import Server, answering

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


def write_credentials(path, token_url):
    """The key file of a service account whose tokens come from ``token_url``."""
    # A new key: one in the repository, even if it is useless, would alarm tools that find secrets.
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
