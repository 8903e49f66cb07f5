"""What test_pod_recipes.py puts in the place of gcloud: folders instead of the workers of a slice.

Called as ``python pod_workers.py FOLDER gcloud-arguments...``; FOLDER holds a home for each worker,
named like its host, the file "calls", a line of JSON for each call, and, unless the slice is READY,
the file "state". Of several slices each is a folder with homes and a state of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main(folder: Path, arguments: list[str]) -> int:
    with open(folder / "calls", "a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    flags = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
    words = [a for a in arguments if not a.startswith("--")]
    for node in words[4:5] if words[3] in ("ssh", "describe") else words[5:6]:
        if (folder / node.partition(":")[0]).is_dir():
            folder = folder / node.partition(":")[0]
    homes = sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "bin")
    if flags.get("worker", "all") != "all":
        homes = [homes[int(flags["worker"])]]
    if words[:3] == ["compute", "tpus", "queued-resources"] and words[3] == "describe":
        print("ACTIVE")
    state = folder / "state"
    if words[2:4] == ["queued-resources", "create"]:
        for gone in folder.glob("*/state"):
            gone.unlink()
    if words[2:4] == ["tpu-vm", "create"]:  # new machines, on which nothing ran
        state.unlink(missing_ok=True)
        for home in homes:
            shutil.rmtree(home / "xla_fsdp_runs", ignore_errors=True)
    if words[2:4] == ["tpu-vm", "describe"]:
        asked = {"value(networkEndpoints[0].ipAddress)": f"ip-of-{folder.name}"}
        print(asked.get(flags["format"], state.read_text() if state.exists() else "READY"))
    if words[3] == "scp":
        for home in homes:
            shutil.copy(words[4], home / words[5].split(":")[1])
    if words[3] != "ssh":
        return 0
    if state.exists():
        return 255
    running = [
        subprocess.Popen(["bash", "-c", flags["command"]], env={**os.environ, "HOME": str(home)})
        for home in homes
    ]
    return max([process.wait() for process in running], default=1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
