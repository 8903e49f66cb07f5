"""python -m xla_fsdp.preflight against a stand-in for the TPU API: what it makes of its answers."""

import json
import socket

import pytest
from preflight_command import ROOT, finish, lines, refusal, start
from tpu_api import TpuApi, error, node, write_credentials


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    return tmp_path_factory.mktemp("key") / "key.json"


@pytest.fixture
def api():
    api = TpuApi()
    yield api
    api.close()


@pytest.fixture
def preflight(api, key, tmp_path):
    """``preflight(*flags, env={})``: the finished command, without asking workers."""
    if not key.exists():
        write_credentials(key, "")
    stated = json.loads(key.read_text()) | {"token_uri": f"{api.url}token"}
    mine = tmp_path / "key.json"
    mine.write_text(json.dumps(stated))

    def run(*flags, **changes):
        return finish(start(api, mine, tmp_path, "--skip_workers", *flags, **changes))

    return run


def test_a_healthy_node(preflight, api):
    done = preflight(
        "--accelerator_type=v3-32", "--runtime_version=tpu-ubuntu2204-base", "--world_size=32"
    )
    checks = lines(done, 0)
    assert {status for status, _ in checks.values()} == {"ok"}
    assert checks["runtime version"][1] == "tpu-ubuntu2204-base"
    assert checks["worker count"][1] == "4 (v3-32: 16 chips)"
    assert checks["world size"][1] == "32 (4 workers of 8 devices)"
    assert done.stdout.splitlines()[-1] == "pod: 6 ok"
    assert done.stderr == ""
    assert api.tokens == [None, "Bearer secret"]  # the description is public


def test_answers_in_the_way_of_v1(preflight, api):
    api.answers = [
        node(
            runtimeVersion=None,
            tensorflowVersion="pytorch-2.0",
            networkEndpoints=None,
            ipAddress="10.0.0.1",
            port="8470",
            acceleratorType="v3-8",
        )
    ]
    checks = lines(preflight(), 0)
    assert checks["runtime version"] == ("ok", "pytorch-2.0")
    assert checks["worker count"] == ("ok", "1 (v3-8: 4 chips)")


def test_another_node_than_expected(preflight):
    done = preflight("--accelerator_type=v3-128", "--runtime_version=other", "--world_size=128")
    checks = lines(done, 1)
    for name, found, expected in (
        ("accelerator type", "v3-32", "v3-128"),
        ("runtime version", "tpu-ubuntu2204-base", "other"),
        ("world size", "32 devices in v3-32", "128"),
    ):
        status, text = checks[name]
        assert status == "FAILED"
        assert text.startswith(f"{found} | expected: {expected} | remedy: ")


def test_another_name_of_the_same_slice(preflight, api):
    api.answers = [node(acceleratorType="v5litepod-16")]
    lines(preflight("--accelerator_type=v5e-16", "--world_size=16"), 0)


def test_missing_workers(preflight, api):
    api.answers = [node(networkEndpoints=node()["networkEndpoints"][:3])]
    status, text = lines(preflight(), 1)["worker count"]
    assert status == "FAILED" and "3 network endpoints | expected: 4 for v3-32" in text


def test_an_accelerator_type_that_is_not_known_yet(preflight, api):
    api.answers = [node(acceleratorType="v9-32")]
    checks = lines(preflight("--world_size=32"), 0)
    assert checks["worker count"][0] == "warning" and "v9-32" in checks["worker count"][1]
    assert checks["world size"][0] == "warning" and "8 devices on each" in checks["world size"][1]


@pytest.mark.parametrize(
    "state, remedy",
    [
        ("CREATING", "--wait 900"),
        ("STOPPED", "gcloud compute tpus tpu-vm start pod --zone us-central2-b --project lab"),
        ("PREEMPTED", "create it again"),
        ("NEW_STATE", "tpu-vm describe pod"),
    ],
)
def test_a_node_that_is_not_ready(preflight, api, state, remedy):
    api.answers = [node(state=state, health=None, networkEndpoints=None)]
    checks = lines(preflight(), 1)
    assert checks["state"][0] == "FAILED"
    assert f"{state} | expected: READY" in checks["state"][1] and remedy in checks["state"][1]
    assert checks["health"][0] == checks["worker count"][0] == "skipped"


def test_an_unhealthy_node_with_symptoms(preflight, api):
    api.answers = [
        node(
            health="UNHEALTHY_MAINTENANCE",
            healthDescription="The TPU had\na maintenance event.",
            symptoms=[
                {"symptomType": "OUT_OF_MEMORY", "workerId": "3", "createTime": "2026-11-21T10:00Z"}
            ],
            upcomingMaintenance={"type": "SCHEDULED", "windowStartTime": "2026-11-30T10:00Z"},
        )
    ]
    checks = lines(preflight(), 1)
    assert checks["health"][0] == "FAILED"
    assert "UNHEALTHY_MAINTENANCE: The TPU had a maintenance event." in checks["health"][1]
    assert checks["symptoms"][0] == "warning"
    assert "OUT_OF_MEMORY on worker 3 at 2026-11-21T10:00Z" in checks["symptoms"][1]
    assert "SCHEDULED from 2026-11-30T10:00Z" in checks["maintenance"][1]


def test_errors_of_the_server_pass(preflight, api):
    api.answers = [error(503, "try later"), error(503, "try later"), node()]
    lines(preflight(), 0)
    assert api.asked_for_node() == 3


def test_errors_of_the_server_that_stay(preflight, api):
    api.answers = [error(503, "try later")]
    status, text = lines(preflight("--retries=1"), 1)["TPU API"]
    assert status == "FAILED"
    assert text.startswith("the API answered 503: try later (tried 2 times) | expected: the node")
    assert api.asked_for_node() == 2


def test_nothing_listens(preflight, api):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and never listens; nobody else can on this port
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/discovery"
        status, text = lines(preflight("--retries=1", "--discovery_url", url), 1)["TPU API"]
    assert status == "FAILED" and "cannot be reached" in text and "(tried 2 times)" in text


def test_a_server_that_accepts_and_says_nothing(preflight):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/discovery"
        # Without a limit it would wait for as long as this server is there.
        done = preflight("--retries=0", "--api_timeout=1", "--discovery_url", url)
        assert "timed out" in lines(done, 1)["TPU API"][1]


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


def test_an_unknown_node(preflight, api):
    api.answers = [error(404, "Resource not found")]
    line = refusal(preflight())
    assert "no node pod in zone us-central2-b of project lab" in line
    assert "there are other, pod" in line
    assert api.asked_for_node() == 1  # not asked again
    api.names = None
    assert "the nodes there cannot be listed" in refusal(preflight())


@pytest.mark.parametrize(
    "status, remedy",
    [(401, "gcloud auth application-default login"), (403, "roles/tpu.viewer"), (400, "--zone")],
)
def test_a_refusal(preflight, api, status, remedy):
    api.answers = [error(status, "not for you")]
    line = refusal(preflight())
    assert f"the API answered {status}: not for you" in line and remedy in line
    # A 401 may mean an expired token: the transport renews it twice.
    assert api.asked_for_node() == (3 if status == 401 else 1)


@pytest.mark.parametrize("body", [b"{", b"<html>The hotel's</html>", b"\xff", b"[]"])
def test_an_answer_that_is_no_node(preflight, api, body):
    api.answers = [(200, body)]
    assert lines(preflight(), 1)["TPU API"][0] == "FAILED"


def test_a_node_with_values_of_other_types(preflight, api):
    api.answers = [node(health=3, networkEndpoints="none", symptoms=[1], acceleratorType=["v3-32"])]
    checks = lines(preflight(), 1)
    assert checks["health"][0] == "warning" and checks["worker count"][0] == "FAILED"


OTHER_API = {"rootUrl": "http://127.0.0.1:9/", "servicePath": "", "resources": {}}


@pytest.mark.parametrize(
    "description", [(200, b"{}"), (200, b"no"), (404, b""), (200, b"[]"), (200, OTHER_API)]
)
def test_a_description_that_is_none(preflight, api, description):
    api.description = description
    assert "--discovery_url" in refusal(preflight())


def test_api_endpoint_is_asked_instead_of_the_described_one(preflight, api):
    other = TpuApi()
    try:
        lines(preflight("--api_endpoint", other.url), 0)
    finally:
        other.close()
    assert api.asked == ["/discovery"] and other.asked_for_node() == 1


def test_no_zone_and_project(preflight):
    assert "give --zone and --project" in refusal(preflight(where=()))
    assert "give --zone:" in refusal(preflight(where=("--project", "lab")))


def test_zone_and_project_of_gcloud(preflight):
    env = {"CLOUDSDK_COMPUTE_ZONE": "us-central2-b", "CLOUDSDK_CORE_PROJECT": "lab"}
    lines(preflight(where=(), env=env), 0)


def test_zone_and_project_of_this_machine(preflight, api):
    path = "/computeMetadata/v1"
    api.machine = {
        f"{path}/project/project-id": "lab",
        f"{path}/instance/zone": "projects/123/zones/us-central2-b",
    }
    env = {"GCE_METADATA_HOST": api.url.removeprefix("http://").rstrip("/")}
    lines(preflight(where=(), env=env), 0)


def test_credentials_that_were_revoked(preflight, api):
    api.token = (400, {"error": "invalid_grant", "error_description": "Token was revoked."})
    line = refusal(preflight())
    assert "the credentials do not work" in line and "Token was revoked" in line
    assert "gcloud auth application-default login" in line


def test_no_credentials(preflight, tmp_path):
    line = refusal(preflight(env={"GOOGLE_APPLICATION_CREDENTIALS": ""}))
    assert "no credentials" in line and "gcloud auth application-default login" in line
    gone = str(tmp_path / "gone.json")
    assert gone in refusal(preflight(env={"GOOGLE_APPLICATION_CREDENTIALS": gone}))


def test_without_the_extra(preflight, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('cloud_tpu_client', 'absl'): sys.modules[name] = None\n"
    )
    line = refusal(preflight(env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}))
    assert "preflight needs cloud_tpu_client, absl, which is not installed" in line
    assert "pip install 'xla_fsdp[pod]'" in line
