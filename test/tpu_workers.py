"""Stand-ins for the workers of a pod: each a folder, which is the HOME of what runs "there"."""

import sys

PACKAGES = {"torch": "2.9.0", "torch_xla": "2.9.0", "libtpu": "0.0.21", "xla_fsdp": "0.1.0"}

# What ssh is to a real pod: runs a command line as one of the workers.
_SSH = """
import os, subprocess, sys
folder, command = os.path.join({root!r}, sys.argv[1]), sys.argv[2]
with open(os.path.join(folder, "behaviour")) as file:
    behaviour = file.read()
if behaviour == "dead":
    sys.exit("ssh: connect to host 10.0.0.1 port 22: No route to host")
if behaviour == "nonsense":
    print("{{\\"token\\": 1}}\\nWelcome!")
    sys.exit(0)
def sleep():
    process = subprocess.Popen(["sleep", "600"])
    with open(os.path.join(folder, "sleeper"), "w") as file:
        file.write(f"{{process.pid}}\\n")
    return process
if behaviour == "hang second":
    with open(os.path.join(folder, "behaviour"), "w") as file:
        file.write("hang")
if behaviour == "hang":
    sleep().wait()
if behaviour == "noisy":
    print("Warning: added to known hosts\\n{{", flush=True)
    # Outlives the command and keeps its output open, as a shared connection of ssh does.
    sleep()
environment = dict(os.environ, HOME=folder, PYTHONPATH=os.path.join(folder, "site"))
for line in behaviour.splitlines():
    if "=" in line:
        environment.update([line.split("=", 1)])
sys.exit(subprocess.run(["sh", "-c", command], env=environment, cwd=folder).returncode)
"""


class Workers:
    """``count`` healthy workers with four chips each; ``shared`` is mounted at ~/mount."""

    def __init__(self, root, count=4):
        self.root = root
        self.shared = root / "shared"
        self.shared.mkdir(parents=True)
        (root / "ssh.py").write_text(_SSH.format(root=str(root)))
        for number in range(count):
            folder = self.folder(number)
            (folder / "dev").mkdir(parents=True)
            (folder / "mount").symlink_to(self.shared)
            for chip in range(4):
                (folder / "dev" / f"accel{chip}").touch()
            for name, version in PACKAGES.items():
                self.install(number, name, version)
            self.behave(number, "")

    def folder(self, number):
        return self.root / str(number)

    def behave(self, number, how):
        """``dead``, ``nonsense``, ``hang``, ``hang second`` (when asked again), ``noisy``, or
        NAME=VALUE lines for the environment."""
        (self.folder(number) / "behaviour").write_text(how)

    def sleeper(self, number):
        """The process that a worker which hangs, or is noisy, has started; 0 if it has not."""
        path = self.folder(number) / "sleeper"
        text = path.read_text() if path.exists() else ""
        return int(text) if text.endswith("\n") else 0

    def install(self, number, name, version):
        """Metadata that is found before what is really installed."""
        folder = self.folder(number) / "site" / f"{name}-{version}.dist-info"
        for old in folder.parent.glob(f"{name}-*.dist-info/METADATA"):
            old.unlink()
            old.parent.rmdir()
        folder.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        if name == "torch_xla":
            lines.append('Requires-Dist: libtpu==0.0.21; extra == "tpu"')
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    def flags(self):
        return [
            # -S: without the packages of this environment Python starts in less time.
            f"--worker_command={sys.executable} -IS {self.root}/ssh.py {{worker}} {{command}}",
            f"--python={sys.executable} -S",
            "--chip_files=~/dev/accel*",
            "--cache_dir=~/cache",
        ]
