"""Documents: what they point to is there, their code runs, and the site has no dead link."""

import ast
import base64
import builtins
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch
import torch_xla
from conftest import ROOT
from nbclient import NotebookClient
from on_ranks import on_each_rank
from processes import run_command
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel, consolidate, optim
from xla_fsdp.sharding.options import FSDPOptions

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "consolidate/*.md", "examples/pod/*.md")
    for path in ROOT.glob(pattern)
)
SOURCES = sorted(
    path for folder in ("xla_fsdp", "consolidate") for path in (ROOT / folder).rglob("*.py")
)
REFERENCE = ROOT / "docs/reference"


def titles(path):
    """The headings of a document, as links name them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [one for one in targets if not (path.parent / one).exists()] == []
    for target, title in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)", text):
        assert title in titles(path.parent / target if target else path), f"{target}#{title}"
    modules = re.findall(r"python -m (benchmarks\.\w+)", text)
    assert [one for one in modules if not (ROOT / f"{one.replace('.', '/')}.py").exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_are_closed(path):
    fences = re.findall(r"^ *```(.*)\n( *\n)?", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0, "a block is not closed"
    assert not any(language for language, _ in fences[1::2]), "a block begins inside a block"
    assert not any(empty for _, empty in fences[::2]), "a block begins with an empty line"


def test_pages_that_the_code_names_exist():
    folders = ("xla_fsdp", "consolidate", "benchmarks", "examples", "test")
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    named = {
        (path.name, page)
        for path in paths
        for page in re.findall(r"(?<![\w./])docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10 and [one for one in named if not (ROOT / one[1]).exists()] == []


def test_tests_that_the_reference_names_exist():
    pages = [path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md")]
    named = {
        name for text in pages for name in re.findall(r"`(?:test/)?(test_\w+)(?:\.py)?`", text)
    }
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / f"test/{name}.py").exists()] == []


@pytest.mark.parametrize("page", ["engine", "code-map"])
def test_files_that_the_chapters_on_the_code_name_exist(page):
    text = (ROOT / f"docs/design/{page}.md").read_text(encoding="utf-8")
    folders = [ROOT, *(ROOT / "xla_fsdp").glob("**/")]
    named = set(re.findall(r"(?<![\w/.])[\w/]+\.py\b", text))
    assert len(named) > 20
    assert [one for one in sorted(named) if not any((f / one).is_file() for f in folders)] == []


@pytest.mark.parametrize("pattern", ["README.md", "docs/how-to/*.md"])
def test_pages_stay_short(pattern):
    paths = list(ROOT.glob(pattern))
    long = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert paths and {name: lines for name, lines in long.items() if lines > 120} == {}


def test_the_readme_example_prints_what_it_returns(run_script):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    done = run_script(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    assert done.returncode == 0 and done.stderr == ""
    assert re.fullmatch(r"\[(\d\.\d+(, )?){4}\]\n", done.stdout)


@on_each_rank(2)
def test_the_readme_example_of_accumulation_runs(rank, folder):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("runs/vit", folder)
    torch.manual_seed(0)
    model = XlaFullyShardedDataParallel(nn.Linear(16, 16))  # 128 weights on each of 2 ranks
    optimizer = torch.optim.AdamW(model.parameters())
    names = dict(xla_fsdp=xla_fsdp, torch=torch, torch_xla=torch_xla, model=model)
    names |= dict(optimizer=optimizer, loss_of=lambda out: out.square().mean())
    names |= dict(micro_batches=torch.ones(2, 3, 16).to("xla"), images=torch.ones(3, 16).to("xla"))
    before = model.weight.to_local().cpu().clone()
    for loaded_step in (None, 1000):
        exec(script, names)
        assert (names["loaded"] and names["loaded"].step) == loaded_step
        assert all(parameter.grad is None for parameter in model.parameters())
        assert names["predictions"].shape == (3, 16) and not names["predictions"].requires_grad
        model.train()
    assert not torch.equal(model.weight.to_local().cpu(), before)


@pytest.mark.full
def test_the_laptop_scripts(run_script, tmp_path):
    text = (ROOT / "docs/get-started/laptop.md").read_text(encoding="utf-8")
    script = re.findall(r"```python\n(# train.py.*?)```", text, re.DOTALL)[0]
    planning = re.findall(r"```python\n(# plan.py.*?)```", text, re.DOTALL)[0]

    def train(folder, steps, ranks=4):
        (tmp_path / folder).mkdir(exist_ok=True)
        changed = script.replace("num_devices=4", f"num_devices={ranks}")
        changed = changed.replace("start + 100", f"start + {steps}")
        done = run_script(changed, cwd=tmp_path / folder)
        assert done.returncode == 0, done.stderr
        return ast.literal_eval(done.stdout)

    train("twice", 3)
    resumed, at_once = train("twice", 3), train("once", 6)
    assert len(resumed) == 4 and resumed == at_once  # on data that the first run did not have
    fewer = train("twice", 100, ranks=2)
    assert len(fewer) == 2 and sum(fewer) / 2 < sum(resumed) / 4
    (tmp_path / "train.py").write_text(script)
    planned = run_script(planning)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith("FITS: ") and "v5litepod-8, 8 devices" in planned.stdout


def test_every_option_is_listed_with_its_default_and_who_takes_it():
    page = (REFERENCE / "options.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)`[ †]*\|(.*)\|$", page, re.MULTILINE))
    letters = {"XlaFullyShardedDataParallel": "W", "fully_shard": "F", "scan_blocks": "S"}
    unused = page.split("## Accepted without effect\n")[1].split("\n## ")[0]
    own = ("reshard_after_forward",)  # fully_shard declares it itself
    for name, field in FSDPOptions.__dataclass_fields__.items():
        if name in unused:
            continue
        default = field.default if isinstance(field.default, str) else str(field.default)
        default = default.removeprefix("BackwardPrefetch.")
        assert f"`{default}`" in rows[name] or f'`"{default}"`' in rows[name], name
        takers = [letters[one] for one in letters if one in field.metadata["taken_by"]]
        assert name in own or rows[name].split("|")[-1].split() == takers, name


# Prefixes of variables that count wherever a string is their name: in lists, dictionaries, flags.
FAMILIES = (
    "ACCELERATE ALLOW CLOUDSDK CPU FSDP GCE GLOO GOOGLE JAX LIBTPU MASTER MEGASCALE OMP OPENBLAS "
    "PJRT PT PTXLA TORCHELASTIC TPU XLA"
).split()
FAMILY = re.compile(rf"({'|'.join(FAMILIES)})(_[A-Z0-9]+)+")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")


def environment_variables(tree, constants):
    """Names of the environment variables that a source reads, sets or lists."""
    for node in ast.walk(tree):
        for part in ast.iter_child_nodes(node) if isinstance(node, ast.stmt) else ():
            text = ast.unparse(part) if isinstance(part, (ast.expr, ast.withitem)) else ""
            if re.search(r"environ\b|environment\b|getenv", text):
                yield from re.findall(r"'([A-Z][A-Z0-9_]+)'", text)
                yield from re.findall(r"\b([A-Z][A-Z0-9_]+)=", text)  # update(NAME=...)
                for name in re.findall(r"\w+", text):
                    yield from constants.get(name, ())
        match node:
            case ast.Attribute(value=ast.Name(id="xenv"), attr=name):
                yield name
            case ast.Constant(value=str(text)):
                yield from (word for word in text.split() if FAMILY.fullmatch(word))


def variables_of_python(folders):
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    ]
    constants = {}
    for tree in trees:
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    constants.setdefault(name, set()).add(text)
    found = {name for tree in trees for name in environment_variables(tree, constants)}
    values = {"CPU", "TPU", "HYBRID"}
    return {name for name in found if VARIABLE.fullmatch(name)} - values


def variables_of_recipes():
    of_bash = {"BASH_SOURCE", "IFS"}
    found = set()
    for path in (ROOT / "examples/pod").iterdir():
        if path.suffix in (".sh", ".yaml") or path.name == "Dockerfile":
            text = path.read_text(encoding="utf-8")
            found |= set(re.findall(r"\$\{?!?([A-Z][A-Z0-9_]+)", text))
            found |= set(re.findall(r"(?:^|export |ENV |[ (])([A-Z][A-Z0-9_]+)=", text, re.M))
            found |= set(re.findall(r"^ +- name: ([A-Z][A-Z0-9_]+)$", text, re.M))
            found |= {word for word in re.findall(r"\w+", text) if FAMILY.fullmatch(word)}
    return found - of_bash


def test_every_environment_variable_of_sources_and_recipes_is_listed():
    page = (REFERENCE / "environment-variables.md").read_text(encoding="utf-8")
    python = variables_of_python(["xla_fsdp", "consolidate", "examples", "benchmarks"])
    shell = variables_of_recipes()
    assert {"PATH", "HOME", "XLA_USE_BF16", "TPU_MIN_LOG_LEVEL", "POD_HOST"} <= python
    assert {"BACK_OFF", "RESTART_ATTEMPT", "TPU_WORKER_HOSTNAMES", "PYTHONUNBUFFERED"} <= shell
    listed = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page))
    prefixes = tuple(re.findall(r"`([A-Z_]+)…`", page))
    missing = sorted((python | shell) - listed)
    assert [name for name in missing if not name.startswith(prefixes)] == []


def test_every_command_is_listed():
    page = (REFERENCE / "command-lines.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"`python -m (xla_fsdp[\w.]*)", page))
    named = {
        name
        for path in DOCUMENTS
        if path.name != "CHANGELOG.md"
        for name in re.findall(r"python -m (xla_fsdp\.[\w.]*\w)", path.read_text(encoding="utf-8"))
    }
    assert named - commands == set()
    for name in commands:
        place = ROOT / name.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), name


def texts_of(path):
    """Every string in a source; an f-string is several."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_messages_on_the_page_of_errors_are_those_of_the_code():
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)[:-1]
    known = [text for path in SOURCES for text in texts_of(path)]
    assert len(headings) >= 10
    assert [one for one in headings if not any(one in text for text in known)] == []


# Exceptions that no user meets: a process or function of this package catches them all.
INTERNAL_ERRORS = {"ApiError", "ImpossibleError", "KnownError", "UsageError"}


def error_classes():
    """The public exception classes of the sources: those that derive from others, or Python's."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    known = {name for name, value in vars(builtins).items() if isinstance(value, type)}
    errors = {name for name in known if issubclass(getattr(builtins, name), BaseException)}
    while more := {name for name, of in bases.items() if of & errors and name not in errors}:
        errors |= more
    return {name for name in errors & bases.keys() if not name.startswith("_")}


def test_every_exception_class_has_a_cause_and_a_remedy():
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`[^|]*) \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    assert all(cause.strip() and remedy.strip() for _, cause, remedy in rows)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    errors = error_classes()
    assert len(errors) > 30 and "CheckpointError" in errors
    assert errors - INTERNAL_ERRORS - described == {"CheckpointError"}  # the base class, above
    assert described - errors == set()


def test_the_rows_on_scale_are_those_that_its_command_prints():
    page = (ROOT / "docs/design/scale.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w[^|]+:[^|]+) \|", page, re.M)
    known = set(texts_of(ROOT / "benchmarks/scale.py"))
    assert len(rows) > 10 and [row for row in rows if row not in known] == []


def build_site(folder):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    words = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    told = run_command(*words, cwd=ROOT, env=environment).stderr.splitlines()
    assert "built" in told[-1]


@pytest.mark.slow
def test_the_site_has_no_dead_link_no_files_of_its_hook_and_loads_nothing_from_elsewhere(tmp_path):
    """In strict mode links and anchors that lead nowhere end the build, unless it is quiet."""
    build_site(tmp_path)
    files = {path.name for path in tmp_path.rglob("*")}
    assert len(files) > 50 and not files & {"hooks.py", "__pycache__"}
    loads = re.compile(r"<(?:link(?! rel=.canonical)|script|img)\b[^>]*?\b(?:href|src)=.([^\s>]+)")
    found = [one for page in tmp_path.rglob("*.html") for one in loads.findall(page.read_text())]
    assert len(found) > 500 and [one for one in found if "//" in one] == []


def test_every_public_name_is_described():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (REFERENCE / "api").glob("*.md"))
    described = re.findall(r"^::: xla_fsdp\.([\w.]+)$", pages, re.MULTILINE)
    public = [*xla_fsdp.__all__, *(f"optim.{name}" for name in optim.__all__)]
    public += [f"consolidate.{name}" for name in consolidate.__all__ if name not in public]
    assert sorted(set(public) - set(described)) == []
    assert len(described) == len(set(described))


NOTEBOOK = ROOT / "examples/quickstart.ipynb"


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """``execute(notebook)`` runs it in an empty folder; what its code cells printed."""
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_THREAD_POOL_SIZE", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "settings"))
    folder = tmp_path / "notebook"
    folder.mkdir()

    def run(notebook):
        at = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=at).execute()
        return [
            "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
            for cell in notebook.cells
            if cell.cell_type == "code"
        ]

    return run


@pytest.mark.full
def test_quickstart(execute):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) == 10
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed with outputs"

    _, _, trained, planned, _, joined = execute(notebook)

    assert "4 ranks, each with 36,608 of 137,802 elements\n" in trained
    first, last = map(float, re.search(r"loss (.+) -> (.+)", trained).groups())
    assert 2 < first < 3 and last < 0.5
    accuracy = re.search(r"accuracy (.+)% on held-out images", trained)[1]
    assert 80 < float(accuracy) < 100
    assert planned.startswith("FITS: ") and "v5litepod-8, 8 devices (v5e)" in planned
    assert re.search(r"sent / bound +1.00 ×", planned)
    assert re.search(r"executables +1 of 3 ", planned)
    (picture,) = notebook.cells[7].outputs
    assert base64.b64decode(picture.data["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"
    assert "wrote joined: 30 parameters (137802 elements)" in joined
    assert f"accuracy {accuracy}% in plain torch, {accuracy}% in shards" in joined
