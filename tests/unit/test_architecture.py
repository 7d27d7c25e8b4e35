"""The house rules, read from the source: layers, no hidden state, short signatures, and what importing costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import usp

ROOT = Path(usp.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

LAYERS = {
    "errors": 0, "positions": 0, "mask": 0, "tiles": 0, "schedule": 0, "heads": 0, "placement": 0, "plugins": 0,
    "files": 0, "layouts": 0, "planner": 0, "version": 0,
    "merge": 1, "kernels": 1, "finite": 1,
    "agreement": 2, "collect": 2, "topology": 2, "all_to_all": 2, "transports": 2,
    "arguments": 3, "ring": 3, "shard": 3, "attention": 3, "kv_cache": 3, "decode": 3,
    "batch": 4, "check": 4, "data": 4, "doctor": 4, "dry_run": 4, "integrations": 4, "loss": 4, "nn": 4, "probe": 4,
    "trace": 4,
    "cli": 4,
}  # fmt: skip
"""The layer of every module and package in usp/: 0 arithmetic, 1 tensors, 2 processes, 3 composition, 4 what users run.

`usp/__init__.py` holds the public names and is in none.
"""
MAY_IMPORT = {0: {0}, 1: {0, 1}, 2: {0, 2}, 3: {0, 1, 2, 3}, 4: {0, 1, 2, 3, 4}}
FORBIDDEN = {0: ("torch", "numpy"), 1: ("torch.distributed",), 2: (), 3: (), 4: ()}
"""What a layer must not import from outside."""
MAX_PARAMETERS = 8


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


every_file = pytest.mark.parametrize("path", SOURCES, ids=shown)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def part(path: Path) -> str:
    """The module or package of usp/ that a file belongs to; "" for `usp/__init__.py`."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def is_module(dotted: str) -> bool:
    path = ROOT.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, wherever it stands; `from usp import mask` is usp.mask."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if is_module(inner) or not inner.startswith("usp.") else str(node.module)


def breaks_the_layers(path: Path, tree: ast.Module) -> list[str]:
    layer = LAYERS[part(path)]
    found = []
    for line, module in imports(tree):
        root, _, rest = module.partition(".")
        if root != "usp":
            if any(module == outside or module.startswith(outside + ".") for outside in FORBIDDEN[layer]):
                found.append(f"{shown(path)}:{line}: layer {layer} imports {module}")
        elif not rest:
            if layer < 4:
                found.append(f"{shown(path)}:{line}: layer {layer} imports the package itself")
        elif LAYERS[rest.split(".")[0]] not in MAY_IMPORT[layer]:
            found.append(f"{shown(path)}:{line}: layer {layer} imports {module}, of layer {LAYERS[rest.split('.')[0]]}")
    return found


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_every_file_is_in_a_layer_and_every_layer_has_its_files():
    assert {part(path) for path in SOURCES} - {""} == set(LAYERS)


@every_file
def test_imports_point_one_way(path):
    if part(path):
        assert not breaks_the_layers(path, parse(path))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("mask.py", "import torch"),
        ("layouts/zigzag.py", "def f():\n    from torch import Tensor"),
        ("schedule.py", "from usp.merge import merge_"),
        ("schedule.py", "from usp import kernels"),
        ("kernels/sdpa.py", "import torch.distributed as dist"),
        ("kernels/sdpa.py", "from torch import distributed"),
        ("kernels/base.py", "from usp.transports.base import Group"),
        ("transports/p2p.py", "import usp.kernels"),
        ("topology.py", "from usp.ring import Ring"),
        ("ring.py", "from usp import Topology"),
        ("attention.py", "if x:\n    from usp.cli import main"),
    ],
)
def test_an_import_against_the_layers_is_found(file, source):
    assert breaks_the_layers(ROOT / file, ast.parse(source))


def test_imports_along_the_layers_are_not():
    source = (
        "import torch.distributed\nfrom usp import kernels, transports\nfrom usp.mask import Mask\nimport usp.shard"
    )
    assert not breaks_the_layers(ROOT / "ring.py", ast.parse(source))


# ---- state, signatures, swallowed errors -----------------------------------------------------------------------------

MUTABLE = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "WeakValueDictionary",
           "WeakKeyDictionary"}  # fmt: skip


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in MUTABLE
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def constant(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and (target.id.isupper() or target.id.startswith("__"))


def hidden_state(tree: ast.Module) -> list[str]:
    """Mutable values that a module or a class keeps under a name that is no constant, and `global` statements."""
    found = [f"line {node.lineno}: global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for statement in (statement for body in bodies for statement in body):
        for node in [statement] if isinstance(statement, ast.Assign | ast.AnnAssign) else module_level(statement):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if mutable(node.value) and not all(map(constant, targets)):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def module_level(statement: ast.stmt) -> Iterator[ast.Assign | ast.AnnAssign]:
    """Assignments inside a compound statement that runs on import."""
    if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                yield node


@every_file
def test_no_module_keeps_state(path):
    assert not hidden_state(parse(path))


@pytest.mark.parametrize(
    "source",
    ["cache = {}", "seen: set[int] = set()", "if True:\n    calls = []", "def f():\n    global x\n    x = 1",
     "pools = defaultdict(list)", "a = B = [1]", "class A:\n    made = []"],
)  # fmt: skip
def test_state_is_found(source):
    assert hidden_state(ast.parse(source))


@pytest.mark.parametrize(
    "source", ["NAMES = ['a']", "_HOME = {}", "__all__ = []", "Alias = dict[str, int]", "def f():\n    found = []"]
)
def test_constants_are_not_state(source):
    assert not hidden_state(ast.parse(source))


def long_signatures(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            a = node.args
            number = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) + bool(a.vararg)  # **kwargs are typed bundles
            if number > MAX_PARAMETERS:
                found.append(f"line {node.lineno}: {getattr(node, 'name', 'lambda')} has {number} parameters")
    return found


@every_file
def test_no_signature_is_long(path):
    assert not long_signatures(parse(path))


def test_a_long_signature_is_found():
    assert long_signatures(ast.parse("def f(self, a, b, /, c, *d, e, f, g, h, **i): ..."))
    assert not long_signatures(ast.parse("def f(self, a, b, /, c, *, e, f, g, **h): ..."))


def swallowed(tree: ast.Module) -> list[str]:
    """Handlers of everything that do nothing."""

    def broad(kind: ast.expr | None) -> bool:
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        return any(k is None or (isinstance(k, ast.Name) and k.id in ("Exception", "BaseException")) for k in kinds)

    def idle(statement: ast.stmt) -> bool:
        nothing = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return nothing or isinstance(statement, ast.Pass | ast.Continue)

    found = [
        f"line {node.lineno}: except"
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and broad(node.type) and all(map(idle, node.body))
    ]
    found += [
        f"line {node.lineno}: suppress"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and any(map(broad, node.args))
    ]
    return found


@every_file
def test_no_error_is_swallowed(path):
    assert not swallowed(parse(path))


@pytest.mark.parametrize(
    "source",
    ["try:\n    f()\nexcept Exception:\n    pass", "try:\n    f()\nexcept:\n    ...",
     "try:\n    f()\nexcept (ValueError, BaseException):\n    pass", "with contextlib.suppress(Exception):\n    f()"],
)  # fmt: skip
def test_a_swallowed_error_is_found(source):
    assert swallowed(ast.parse(source))


def test_a_narrow_or_busy_handler_is_not():
    assert not swallowed(ast.parse("try:\n    f()\nexcept KeyError:\n    pass\nexcept Exception as e:\n    note(e)"))


# ---- trust -----------------------------------------------------------------------------------------------------------

UNTRUSTWORTHY = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "_pickle"}
"""Modules that run code from what they read."""
EVALUATES = {"eval", "exec", "__import__"}
WRITES = {"open", "write_text", "write_bytes", "savefig"}
"""What writes a file under its own name, unless it is `usp/files.py`."""


def trusting(tree: ast.Module) -> list[str]:
    """Where what comes from a file, or from another rank, could be run."""
    found = [f"line {line}: {module}" for line, module in imports(tree) if module.split(".")[0] in UNTRUSTWORTHY]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            last = name.rpartition(".")[2]
            collective = last.removesuffix("_list").endswith("_object")
            if collective or last in ("unsafe_load", "full_load", "UnsafeLoader", "FullLoader") or name == "yaml.load":
                found.append(f"line {node.lineno}: {name}")
        if isinstance(node, ast.Call):
            name, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in EVALUATES or (name == "torch.load" and options.get("weights_only") != "True"):
                found.append(f"line {node.lineno}: {name}")
    return found


@every_file
def test_nothing_that_is_read_is_run(path):
    assert not trusting(parse(path))


@pytest.mark.parametrize(
    "source",
    ["import pickle", "def f():\n    from marshal import loads", "dist.all_gather_object(a, b)",
     "dist.broadcast_object_list(a)", "from torch.distributed import gather_object as g\ngather_object(a)",
     "torch.load(path)", "torch.load(path, weights_only=False)", "yaml.load(text, Loader=L)", "yaml.unsafe_load(text)",
     "class L(yaml.UnsafeLoader): ...", "eval(text)", "exec(text)", "__import__(name)"],
)  # fmt: skip
def test_what_runs_what_it_reads_is_found(source):
    assert trusting(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["json.loads(text)", "torch.load(path, weights_only=True)", "class L(yaml.SafeLoader): ...", "model.eval()",
     "torch.compile(f)", "dist.all_gather(a, b)", "object()"],
)  # fmt: skip
def test_what_only_reads_is_not(source):
    assert not trusting(ast.parse(source))


def test_files_are_written_in_one_place():
    """Whole or not at all; a picture is drawn into memory first."""
    found = [
        f"{shown(path)}:{node.lineno}: {ast.unparse(node)[:60]}"
        for path in SOURCES
        if path != ROOT / "files.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in WRITES
    ]
    assert [each.split(":")[0] for each in found] == ["usp/cli/output.py"] and "savefig(content" in found[0]


# ---- importing -------------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_arithmetic_needs_no_torch():
    """Neither importing nor using it: the planner and the command line start without."""
    layer_0 = [f"usp.{name}" for name, layer in LAYERS.items() if layer == 0]
    loaded = python(
        f"import sys\nimport usp.positions, usp.schedule, usp.layouts\nimport {', '.join(layer_0)}\n"
        "for name in usp.layouts.names():\n"
        "    mask = usp.Mask.causal() & usp.Mask.documents([60, 40])\n"
        "    schedule = usp.Schedule(mask, usp.layout_for(name, mask), 100, 4)\n"
        "    assert sum(map(schedule.work, range(4))) == 60 * 61 // 2 + 40 * 41 // 2\n"
        "from usp.heads import share; from usp.placement import place; place(['a', 'b'], 1, 2)\n"
        "usp.InputError, usp.Band, usp.__version__\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert loaded == "[]"


def test_the_public_names():
    assert usp.__all__ == [
        "AgreementError", "Band", "CheckReport", "ClusterSpec", "InputError", "KVCache", "KernelError", "Mask",
        "ModelSpec", "NumericsError", "Plan", "Schedule", "Topology", "TopologyError", "TransportError", "USPAttention",
        "USPError", "Workload", "attention", "check", "check_batch", "check_replicas", "count_targets", "cross_entropy",
        "decode", "extend", "layout_for", "linear_cross_entropy", "plan", "positions", "shard", "shard_batch",
        "unshard",
    ]  # fmt: skip
    for name in usp.__all__:
        assert getattr(usp, name).__name__ == name
    assert set(usp.__all__) <= set(dir(usp))


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match=r"^module 'usp' has no attribute 'flash'$"):
        usp.flash  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


CHECK = """
import types
for name in ("positions", "shard", "attention", "decode", "check"):
    thing = getattr(usp, name)
    assert isinstance(thing, types.FunctionType) and thing.__name__ == name, (name, thing)
from usp.positions import split
from usp.shard import shard
from usp.attention import USPAttention
assert split(3, 2) == (range(0, 2), range(2, 3))
assert shard is usp.shard and USPAttention is usp.USPAttention
import usp.positions, usp.shard, usp.attention
assert all(isinstance(f, types.FunctionType) for f in (usp.positions, usp.shard, usp.attention))
print("functions")
"""


@pytest.mark.parametrize(
    "first",
    ["import usp.attention, usp.shard, usp.positions, usp", "import usp; usp.shard, usp.positions, usp.attention"],
    ids=["submodules first", "functions first"],
)
def test_functions_keep_their_names_beside_modules(first):
    assert python(first + CHECK) == "functions"
