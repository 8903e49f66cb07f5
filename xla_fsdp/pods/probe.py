"""The program that runs on each worker, sent as text: standard library only, Python 3.6 or later.

The request's token distinguishes its answer, a line of JSON, from other output of a login.
"""

import contextlib
import glob
import json
import os
import platform
import shutil
import signal
import sys
import time
from typing import Any

PACKAGES = ("torch", "torch_xla", "libtpu", "xla_fsdp", "jax", "jaxlib")
# They change compiled programs or devices.
VARIABLES = (
    "PJRT_DEVICE",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "XLA_DISABLE_FUNCTIONALIZATION",
    "XLA_NO_SPECIAL_SCALARS",
)
LOCK = "/tmp/libtpu_lockfile"
PATIENCE_SECONDS = 5.0  # a network file system may show files of others late


def main(text: str) -> None:
    request = json.loads(text)
    # Ends this process even if the connection breaks, unless a dead mount blocks it.
    signal.alarm(int(request["seconds"]) + 1)
    actions = {"look": look, "write": write, "read": read, "clean": clean}
    try:
        answer = actions[request["action"]](request)
    except Exception as error:
        answer = {"error": describe_error(error)}
    answer["token"] = request["token"]
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


def describe_error(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def look(request: dict) -> dict:
    chips = sorted(
        path for pattern in request["chip_files"] for path in glob.glob(os.path.expanduser(pattern))
    )
    return {
        "time": time.time(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "required_libtpu_version": required_libtpu_version(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "chips": len(chips),
        "users": users_of(chips),
        "foreign_lock": os.path.exists(LOCK) and not os.access(LOCK, os.W_OK),
        "memory": memory(),
        "cache_free": free_bytes(request["cache_dir"]),
    }


def version(name: str) -> "str | None":
    with contextlib.suppress(Exception):  # Python may be older than the module
        import importlib.metadata

        return importlib.metadata.version(name)
    return None


def required_libtpu_version() -> "str | None":
    """From torch_xla's metadata."""
    with contextlib.suppress(Exception):  # not installed, or too old
        import importlib.metadata

        for line in importlib.metadata.requires("torch_xla") or ():
            if line.startswith("libtpu=="):
                return line[len("libtpu==") :].split(";")[0].strip()
    return None


def users_of(chips: list) -> list:
    """The processes that use a chip, as far as this user can see them."""
    wanted = {os.path.realpath(path) for path in chips}
    found = set()
    for link in glob.glob("/proc/[0-9]*/fd/*") if wanted else ():
        with contextlib.suppress(OSError):  # ended, or another user's
            if os.readlink(link) in wanted:
                pid = link.split("/")[2]
                with open(f"/proc/{pid}/comm") as file:
                    found.add(f"{pid} ({file.read().strip()})")
    return sorted(found)[:8]


def memory() -> "list | None":
    """Total and available bytes; None if this is not Linux."""
    sizes = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                words = line.split()
                sizes[words[0].rstrip(":")] = int(words[1]) * 1024
        return [sizes["MemTotal"], sizes["MemAvailable"]]
    except (OSError, KeyError, ValueError, IndexError):
        return None


def free_bytes(path: str) -> int:
    """``path`` need not exist."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


class Folder:
    """A local folder, or one of fsspec if ``path`` is a URL."""

    def __init__(self, path: str) -> None:
        self.files: Any = None
        self.path = os.path.abspath(os.path.expanduser(path))
        if "://" in path:
            import fsspec

            self.files, self.path = fsspec.core.url_to_fs(path, use_listings_cache=False)

    def make(self) -> list:
        """Returns the local parents that it created, innermost first."""
        made, path = [], os.path.dirname(self.path)
        while not self.files and not os.path.isdir(path) and os.path.dirname(path) != path:
            made.append(path)
            path = os.path.dirname(path)
        (self.files or os).makedirs(self.path, exist_ok=True)
        return made

    def open(self, name: str, mode: str) -> Any:
        if self.files:
            self.files.invalidate_cache()
        return (self.files.open if self.files else open)(self.path + "/" + name, mode)

    def clear(self, name: str) -> None:
        """Removes the file ``name``, and the folder if it is empty then."""
        with contextlib.suppress(FileNotFoundError):
            (self.files.rm_file if self.files else os.remove)(self.path + "/" + name)
        # It may have other files, or the store no folders.
        with contextlib.suppress(Exception):
            (self.files or os).rmdir(self.path)


def folder_of(request: dict) -> Folder:
    return Folder(request["path"].rstrip("/") + "/.preflight-" + request["token"])


def content_of(request: dict, worker: int) -> bytes:
    return f"{request['token']} {worker}\n".encode("ascii")


def write(request: dict) -> dict:
    folder = folder_of(request)
    answer: dict = {"made": folder.make()}
    try:
        with folder.open(str(request["worker"]), "wb") as file:
            file.write(content_of(request, request["worker"]))
        answer["free"] = None if folder.files else free_bytes(folder.path)
    except Exception as error:  # the answer lists the new folders
        answer["error"] = describe_error(error)
    return answer


def read(request: dict) -> dict:
    """Lists the workers whose files are missing here, and those whose files differ."""
    folder = folder_of(request)
    end = time.time() + min(PATIENCE_SECONDS, request["seconds"] / 2)
    missing, different = list(request["workers"]), []
    while True:
        for worker in list(missing):
            try:
                with folder.open(str(worker), "rb") as file:
                    found = file.read()
            except FileNotFoundError:
                continue
            missing.remove(worker)
            if found != content_of(request, worker):
                different.append(worker)
        if not missing or time.time() > end:
            return {"missing": missing, "different": different}
        time.sleep(0.2)


def clean(request: dict) -> dict:
    """``made``: folders that ``make`` created, by worker; removed if they are empty."""
    folder_of(request).clear(str(request["worker"]))
    for path in request.get("made", {}).get(str(request["worker"]), []):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)
    return {}
