"""python -m xla_fsdp.preflight against a fake TPU API, and servers that lie or never end."""

import gc
import socket
import time
import warnings

import pytest
import tpu_api
from tpu_api import TpuApi, call, discovery, error, lines, node, refusal, write_credentials
from web_server import Server, answering

from xla_fsdp import extras
from xla_fsdp.preflight import main

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def abandoned_connections():
    """Closes the connections of answers that never end, which the command leaves to its end."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def api():
    with TpuApi() as api:
        yield api


@pytest.fixture
def preflight(api, tmp_path, monkeypatch, capsys):
    """``preflight(*flags, env={})``: the finished command, without asking workers."""
    key = write_credentials(tmp_path / "key.json", f"{api.url}token")
    how = (monkeypatch, capsys, api, key, tmp_path, "--skip_workers")
    return lambda *flags, **changes: call(*how, *flags, **changes)


def test_a_healthy_node(preflight, api):
    version = "tpu-ubuntu2204-base"
    done = preflight("--accelerator_type=v3-32", f"--runtime_version={version}", "--world_size=32")
    checks = lines(done, 0)
    assert {status for status, _ in checks.values()} == {"ok"}
    assert checks["runtime version"][1] == version
    assert checks["worker count"][1] == "4 (v3-32: 16 chips)"
    assert checks["world size"][1] == "32 (4 workers of 8 devices)"
    assert done.stdout.splitlines()[-1] == "pod: 6 ok"
    assert done.stderr == ""
    tokens = [headers.get("Authorization") for _, headers in api.asked]
    assert tokens == [None, "Bearer secret"]  # the description is public


V1 = {
    "runtimeVersion": None, "tensorflowVersion": "pytorch-2.0", "networkEndpoints": None,
    "ipAddress": "10.0.0.1", "port": "8470", "acceleratorType": "v3-8",
}  # fmt: skip
SYMPTOM = {"symptomType": "OUT_OF_MEMORY", "workerId": "3", "createTime": "2026-11-21T10:00Z"}
UNHEALTHY = {
    "health": "UNHEALTHY_MAINTENANCE",
    "healthDescription": "The TPU had\na maintenance event.",
    "symptoms": [SYMPTOM],
    "upcomingMaintenance": {"type": "SCHEDULED", "windowStartTime": "2026-11-30T10:00Z"},
}
STRANGE = {"health": 3, "networkEndpoints": "", "symptoms": [1], "acceleratorType": ["v3-32"]}
NEW_TYPE = {"acceleratorType": "v9-32"}


def not_ready(state):
    return {"state": state, "health": None, "networkEndpoints": None}


OTHER = "--accelerator_type=v3-128 --runtime_version=other --world_size=128"
START = "gcloud compute tpus tpu-vm start pod --zone us-central2-b --project lab"
V5E_16 = {"acceleratorType": "v5litepod-16"}  # another name of the slice v5e-16
THREE = {"networkEndpoints": node()["networkEndpoints"][:3]}
NODES = [
    (V1, "", 0, "runtime version: ok pytorch-2.0", "worker count: ok 1 (v3-8: 4 chips)"),
    ({}, OTHER, 1, "accelerator type: FAILED v3-32 | expected: v3-128 | remedy: ",
     "runtime version: FAILED tpu-ubuntu2204-base | expected: other | remedy: ",
     "world size: FAILED 32 devices in v3-32 | expected: 128 | remedy: "),
    (V5E_16, "--accelerator_type=v5e-16 --world_size=16", 0, "accelerator type: ok v5litepod-16"),
    (THREE, "", 1, "worker count: FAILED 3 network endpoints | expected: 4 for v3-32"),
    (NEW_TYPE, "--world_size=32", 0, "worker count: warning 4, of an accelerator type that",
     "8 devices on each"),
    (not_ready("CREATING"), "", 1, "state: FAILED CREATING | expected: READY", "--wait 900"),
    (not_ready("STOPPED"), "", 1, START, "health: skipped ", "worker count: skipped "),
    (not_ready("PREEMPTED"), "", 1, "create it again"),
    (not_ready("NEW_STATE"), "", 1, "tpu-vm describe pod"),
    (UNHEALTHY, "", 1, "health: FAILED UNHEALTHY_MAINTENANCE: The TPU had a maintenance event.",
     "symptoms: warning OUT_OF_MEMORY on worker 3 at 2026-11-21T10:00Z",
     "maintenance: warning SCHEDULED from 2026-11-30T10:00Z"),
    (STRANGE, "", 1, "health: warning ", "worker count: FAILED "),
]  # fmt: skip


@pytest.mark.parametrize("case", NODES)
def test_nodes(preflight, api, case):
    changes, flags, code, *parts = case
    api.answers = [node(**changes)]
    checks = lines(preflight(*flags.split()), code)
    text = "\n".join(f"{name}: {status} {found}" for name, (status, found) in checks.items())
    assert [part for part in parts if part not in text] == []


def test_errors_of_the_server_that_pass_and_that_stay(preflight, api):
    api.answers = [error(503, "try later"), error(503, "try later"), node()]
    lines(preflight(), 0)
    assert api.asked_for_node() == 3
    api.answers = [error(503, "try later")]
    api.asked.clear()
    status, text = lines(preflight("--retries=1"), 1)["TPU API"]
    assert status == "FAILED"
    assert text.startswith("the API answered 503: try later (tried 2 times) | expected: the node")
    assert api.asked_for_node() == 2


@pytest.mark.parametrize("listens, words", [(False, "cannot be reached"), (True, "timed out")])
def test_nobody_answers(preflight, listens, words):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else can listen on this port
        if listens:
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/discovery"
        # Without a limit it would wait for as long as this socket is there.
        done = preflight("--retries=1", "--api_timeout=0.3", "--discovery_url", url)
    status, text = lines(done, 1)["TPU API"]
    assert status == "FAILED" and words in text and "(tried 2 times)" in text


def test_waiting_until_ready_and_healthy(preflight, api):
    api.answers = [node(state="CREATING", health=None), node(health="TIMEOUT"), node()]
    done = preflight("--wait=600")
    lines(done, 0)
    assert done.stderr.splitlines() == [
        "waiting: state CREATING, health not stated",
        "waiting: state READY, health TIMEOUT",
    ]


def test_waiting_no_longer_than_said_nor_in_vain(preflight, api):
    api.answers = [node(state="CREATING")]
    assert lines(preflight("--wait=1.5"), 1)["state"][0] == "FAILED"
    api.answers = [node(state="PREEMPTED")]
    api.asked.clear()
    done = preflight("--wait=600")
    assert lines(done, 1)["state"][0] == "FAILED"
    assert api.asked_for_node() == 1 and "waiting" not in done.stderr


LOGIN, KEY = "gcloud auth application-default login", "GOOGLE_APPLICATION_CREDENTIALS"
REVOKED = {"error": "invalid_grant", "error_description": "Token was revoked."}
# What the API has, how the command is run, how often the node is asked for, and what is said.
REFUSALS = [
    ({"answers": [error(404, "gone")]}, {}, 1,
     "no node pod in zone us-central2-b of project lab", "there are other, pod"),
    ({"answers": [error(404, "gone")], "names": None}, {}, 1, "the nodes there cannot be listed"),
    # A 401 may mean an expired token: the transport renews it twice.
    ({"answers": [error(401, "not for you")]}, {}, 3, "API answered 401: not for you", LOGIN),
    ({"answers": [error(403, "no")]}, {}, 1, "the API answered 403: no", "roles/tpu.viewer"),
    ({"answers": [error(400, "no")]}, {}, 1, "the API answered 400: no", "--zone"),
    ({"token": (400, REVOKED)}, {}, 0, "the credentials do not work", "Token was revoked", LOGIN),
    ({}, {"env": {KEY: ""}}, 0, "no credentials", LOGIN),
    ({}, {"env": {KEY: "/gone.json"}}, 0, "/gone.json"),
    ({}, {"where": ()}, 0, "give --zone and --project"),
    ({}, {"where": ("--project", "lab")}, 0, "give --zone:"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_what_to_do(preflight, api, case):
    has, how, times, *words = case
    vars(api).update(has)
    line = refusal(preflight(**how))
    assert [word for word in words if word not in line] == [] and api.asked_for_node() == times


def test_answers_that_are_no_node_and_no_description(preflight, api):
    for body in (b"{", b"<html>The hotel's</html>", b"\xff", b"[]"):
        api.answers = [(200, body)]
        assert lines(preflight(), 1)["TPU API"][0] == "FAILED", body
    other_api = {"rootUrl": "http://127.0.0.1:9/", "servicePath": "", "resources": {}}
    for answer in ((200, b"{}"), (200, b"no"), (404, b""), (200, b"[]"), (200, other_api)):
        api.description = answer
        assert "--discovery_url" in refusal(preflight()), answer


def test_zone_and_project_are_those_of_gcloud_and_of_this_machine(preflight, api):
    env = {"CLOUDSDK_COMPUTE_ZONE": "us-central2-b", "CLOUDSDK_CORE_PROJECT": "lab"}
    lines(preflight(where=(), env=env), 0)
    zone = {"/computeMetadata/v1/instance/zone": "projects/123/zones/us-central2-b"}
    api.machine = {"/computeMetadata/v1/project/project-id": "lab", **zone}
    lines(preflight(where=(), env={"GCE_METADATA_HOST": api.host}), 0)


def test_without_the_extra(preflight, monkeypatch):
    found, gone = extras.importlib.util.find_spec, ("cloud_tpu_client", "absl")
    monkeypatch.setattr(
        extras.importlib.util, "find_spec", lambda name: None if name in gone else found(name)
    )
    line = refusal(preflight())
    assert "preflight needs cloud_tpu_client, absl, which is not installed" in line
    assert "pip install 'xla_fsdp[pod]'" in line


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--ckpt_dir=/x",), "leave out --skip_workers"),
        (("--tpu=a/b",), "'a/b' is not a valid name"),
        (("--timeout=nan",), "--timeout"),
        (("--retries=-1",), "--retries"),
        (("--world_size=1.5",), "'1.5' is not a whole number from 1"),
        (("--world_size=many",), "--world_size"),
        (("--discovery_url=http://[::1",), "--discovery_url 'http://[::1': Invalid IPv6 URL; give"),
        (("--discovery_url=nourl",), "'nourl': it starts with neither http:// nor https://"),
        (("--discovery_url=http://",), "no host"),
        (("--discovery_url=http://x:0/",), "port 0"),
        (("--discovery_url=http://x y/",), "spaces"),
        (("--api_endpoint=http://127.0.0.1:99999/",), "99999/': Port out of range 0-65535"),
        ((), "$TPU_API_DISCOVERY_URL 'nourl': it starts with neither"),
    ],
)
def test_wrong_flags(flags, said, capsys, monkeypatch):
    if not flags:
        monkeypatch.setenv("TPU_API_DISCOVERY_URL", "nourl")
    try:
        code = main(["--tpu=pod", *tpu_api.WHERE, "--skip_workers", *flags])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and said in capsys.readouterr().err.splitlines()[-1]


COMPLETE = answering(b"{}")
ENDLESS = answering(piece=b" " * (1 << 20))
DRIPPING = answering(piece=b" ", pause=0.1)  # each byte in time
TRUNCATED = answering(b'{"state": ', Content_Length="1000")


def redirect(to):
    return answering(status=302, Location=to, Metadata_Flavor="Google")


@pytest.mark.parametrize("how", ["rootUrl", "servicePath", "path"])
def test_a_description_does_not_lead_the_token_elsewhere(preflight, api, how):
    with Server(COMPLETE) as elsewhere:
        url = elsewhere.url
        described = discovery(url if how == "rootUrl" else "http://127.0.0.1:9/")
        nodes = described["resources"]["projects"]["resources"]["locations"]["resources"]["nodes"]
        if how == "servicePath":
            described["servicePath"] = url
        if how == "path":
            for method in nodes["methods"].values():
                method["path"] = method["flatPath"] = url + method["path"]
        api.description = 200, described
        said = refusal(preflight("--retries=0"))
        assert "--api_endpoint" in said and "token" in said
        assert elsewhere.asked == []
        assert "secret" not in said


def test_redirects_are_not_followed(preflight, api):
    with Server(COMPLETE) as elsewhere, Server(redirect(elsewhere.url)) as door:
        api.description = 200, discovery(api.url)
        done = preflight("--retries=0", "--api_endpoint", door.url)
        assert "302" in refusal(done)
        assert "302" in refusal(preflight("--retries=0", "--discovery_url", door.url))
        assert elsewhere.asked == [] and len(door.asked) == 2


def test_a_metadata_server_that_leads_elsewhere_or_never_ends(preflight):
    with Server(COMPLETE) as other, Server(redirect(other.url)) as door, Server(DRIPPING) as slow:
        for server in (door, slow):
            began = time.monotonic()
            done = preflight(where=(), env={"GCE_METADATA_HOST": server.host})
            assert "give --zone and --project" in refusal(done)
            assert server.asked and time.monotonic() - began < 60
        assert other.asked == []


@pytest.mark.parametrize(
    "answer, seconds, said",
    [
        (ENDLESS, 300, "more than 16 MiB"),
        (DRIPPING, 0.3, "timed out"),
        (TRUNCATED, 300, "IncompleteRead"),
    ],
)
@pytest.mark.parametrize("what", ["--discovery_url", "--api_endpoint"])
def test_answers_that_do_not_end_well(preflight, what, answer, seconds, said):
    with Server(answer) as server:
        done = preflight("--retries=0", f"--api_timeout={seconds}", what, server.url)
        assert said in lines(done, 1)["TPU API"][1]


def test_no_secrets_in_what_is_said(preflight, api):
    api.answers = [error(403, f"you sent Bearer {api.token[1]['access_token']}, {'x' * 300}")]
    assert "secret" not in refusal(preflight())
    address = api.url.replace("http://", "http://me:password@")
    said = refusal(preflight("--discovery_url", f"{address}discovery?key=private"))
    assert "it contains a user name" in said and "password" not in said and "private" not in said
    api.description = 404, b""
    said = refusal(preflight("--discovery_url", f"{api.url}discovery?key=private"))
    assert "answered 404" in said and "private" not in said
