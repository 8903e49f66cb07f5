"""What the consolidation package uses of torch is what torch 2.4 has."""

import ast

from conftest import ROOT

# Looked up in torch 2.4.0 by hand. Before a name is added here, look it up there too.
KNOWN = """
Tensor UntypedStorage dtype strided empty equal frombuffer load
bfloat16 float16 float32 float64 float8_e4m3fn float8_e5m2 complex64 bool
int8 int16 int32 int64 uint8 uint16 uint32 uint64
_utils._rebuild_tensor_v2 _utils._rebuild_tensor_v3
storage._new_dtypes storage._dtype_to_storage_type_map
""".split()
# Since 2.6, where it makes an error say more; without it another way is taken.
OPTIONAL = {"serialization.get_unsafe_globals_in_checkpoint"}


def dotted(node):
    """``a.b.c`` of nested attributes, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner else ""


def test_names_of_torch():
    used = set()
    for path in (ROOT / "consolidate").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] != "torch", path  # not seen below
            if isinstance(node, ast.Attribute) and node not in inside:
                name = dotted(node)
                if name.startswith("torch."):
                    used.add(name.removeprefix("torch."))
    assert used - OPTIONAL == set(KNOWN)
