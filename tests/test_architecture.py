"""Who may import whom: rooms import lower ones only, no module is in a circle, and functions are no way around it."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import burst_plugin
from burst_plugin.schedule.rings import SCHEDULES
from burst_plugin.sequence.layout import LAYOUTS

PACKAGE = Path(burst_plugin.__file__).parent
# From the ground up. A room, a folder or a file beside them, imports those of lower floors, and itself.
FLOORS = (
    ("checks",),
    ("types", "topology", "scores"),
    ("sequence", "schedule", "comm", "kernels"),
    ("compute", "profiling"),
    ("strategy",),
    ("ring",),
    ("assignment", "moved_tokens"),
    ("activations",),
    ("planning",),
    ("context",),
    ("attention", "batch", "trajectories"),
    ("latents",),
    ("virtual", "inference"),
    ("recurrent",),
    ("sparse", "towers", "relative_bias"),
    ("training",),
    ("__init__",),
    ("check",),
    ("frameworks",),
    ("huggingface", "integrations"),
    ("megatron", "deepspeed"),
    ("cli", "run"),
)


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(path for path in PACKAGE.rglob("*.py") if "starters" not in path.parts):  # which are data
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imports(source: str, modules: Mapping[str, Path], *, for_types: bool = False) -> set[str]:
    """The modules of the package that a source imports anywhere; those under TYPE_CHECKING only if asked for."""
    tree, found = ast.parse(source), set()
    only_for_types = {
        inner
        for node in ast.walk(tree)
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in only_for_types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "burst_plugin":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
    return found


def _room(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def _upward(imports: Mapping[str, set[str]]) -> list[str]:
    """The imports that do not lead to a lower floor."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    return [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in sorted(others)
        if _room(module) != _room(other) and floor[_room(module)] <= floor[_room(other)]
    ]


def _circles(imports: Mapping[str, set[str]]) -> list[str]:
    """The imports from which a module comes back to itself."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = imports[left.pop()] - seen
            seen |= new
            left += new
        return seen

    behind = {module: reached(module) for module in imports}
    return [f"{a} and {b}" for a, others in imports.items() for b in sorted(others) if a in behind[b] | {b}]


MODULES = dict(_modules())
IMPORTS = {module: _imports(path.read_text(), MODULES) - {module} for module, path in MODULES.items()}


def test_every_import_leads_to_a_lower_floor() -> None:
    assert _upward(IMPORTS) == []


def _circles_with_types(planted: Mapping[str, str]) -> list[str]:
    """The circles of imports with imports for type checkers; `planted` are other sources."""
    sources = {module: path.read_text() for module, path in MODULES.items()} | dict(planted)
    imports = {module: _imports(text, MODULES, for_types=True) - {module} for module, text in sources.items()}
    return _circles(imports)


def test_no_module_is_in_an_import_circle() -> None:
    assert _circles(IMPORTS) == []
    assert _circles_with_types({}) == []


def test_a_circle_of_imports_for_type_checkers_is_found() -> None:
    planted = "if TYPE_CHECKING:\n    from burst_plugin.sequence.prefix_tree import PrefixTree\n"
    assert "burst_plugin.sequence.mask and burst_plugin.sequence.prefix_tree" in _circles_with_types(
        {"burst_plugin.sequence.mask": planted}
    )


def test_an_import_that_leads_up_is_found_in_functions_too() -> None:
    planted = "def f():\n    from burst_plugin.ring import executor\n"
    imports = {**IMPORTS, "burst_plugin.comm.transport": _imports(planted, MODULES)}
    assert _upward(imports) == ["burst_plugin.comm.transport imports burst_plugin.ring.executor"]
    assert "burst_plugin.comm.transport and burst_plugin.ring.executor" in _circles(imports)


def _repeated_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that several classes have, each with the modules of these classes."""
    homes = defaultdict[str, list[str]](list)
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_no_two_classes_share_a_name() -> None:
    sources = {module: path.read_text() for module, path in MODULES.items()}
    assert _repeated_names(sources) == {}
    planted = {**sources, "burst_plugin.planted": "class Topology:\n    pass\n"}
    assert _repeated_names(planted) == {"Topology": ["burst_plugin.topology", "burst_plugin.planted"]}


def test_no_file_name_is_in_three_rooms() -> None:
    rooms = defaultdict[str, set[str]](set)
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            rooms[path.name].add(_room(module))
    assert {name: found for name, found in rooms.items() if len(found) > 2} == {}


def test_modules_do_not_list_their_names() -> None:
    """Packages do, whose names users import."""
    listing = [path for path in MODULES.values() if path.name != "__init__.py" and "\n__all__" in path.read_text()]
    assert listing == []


def test_few_files_lie_beside_the_rooms() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 14


def test_no_folder_of_megatrons_adapter_has_more_than_ten_files() -> None:
    root = PACKAGE / "megatron"
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert {folder.name: count for folder in folders if (count := len(list(folder.glob("*.py")))) > 10} == {}


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    """The lines of a file and of each of its functions, docstrings aside, and the parameters of each function."""
    source = path.read_text()
    yield "lines of a file", len(source.splitlines())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) else None
            whole, said = (each.end_lineno - each.lineno + 1 if each else 0 for each in (node, docstring))
            yield f"lines of {node.name}", whole - said
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield f"parameters of {node.name}", len([each for each in given if each.arg not in ("self", "cls")])


def test_files_and_functions_are_short() -> None:
    limits = {"lines of a file": 500, "parameters": 7, "lines": 50}
    # Users call the first nine by keywords; the last takes what TRL's method takes.
    called = {"burst_attention", "latent_attention", "relative_attention", "gated_delta_rule", "linear_cross_entropy"}
    called |= {"select_keys", "select_blocks", "select_pools"}
    by_keywords = {f"parameters of {name}" for name in called | {"state_space"}}
    longer = by_keywords | {"parameters of __call__"}
    found = [
        f"{path}: {size} {what}"
        for path in MODULES.values()
        for what, size in _sizes(path)
        if what not in longer and size > limits.get(what, limits[what.split()[0]])
    ]
    assert found == []


# Words of frameworks, and the rooms that may use them.
FRAMEWORK = re.compile(
    r"megatron|deepspeed|\btransformers\b|hugging ?face|\baccelerate\b|\btrl\b|\bdiffusers\b", re.IGNORECASE
)
FRAMEWORK_ROOMS = ("megatron", "deepspeed", "huggingface", "integrations")
REGISTRY = ("burst_plugin.frameworks", "FRAMEWORKS = ('megatron', 'deepspeed')")
# Advice in messages: what the user calls or sets there.
ADVICE = (
    "Trainer, Accelerate: sp_size of ParallelismConfig, with DeepSpeed",
    "Megatron's --attention-dropout is 0.1 unless it is set",
    "burst_plugin.deepspeed.sharded_loader",
)


def _code(source: str) -> str:
    """A source without docstrings and comments, every statement on one line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


def _named(code: str) -> list[str]:
    """The lines of code that name a framework, but for advice."""
    for advice in ADVICE:
        code = code.replace(advice, "").replace(repr(advice)[1:-1], "")
    return [line for line in code.splitlines() if FRAMEWORK.search(line)]


def test_frameworks_are_named_in_their_rooms_and_registered_in_one_line() -> None:
    code = {
        module: _code(path.read_text()) for module, path in MODULES.items() if _room(module) not in FRAMEWORK_ROOMS
    }
    named = {module: lines for module, text in code.items() if (lines := _named(text))}
    assert named == {REGISTRY[0]: [REGISTRY[1]]}
    for advice in ADVICE:
        assert sum(text.replace("\\'", "'").count(advice) for text in code.values()) == 1, advice


def test_a_framework_that_is_named_elsewhere_is_found() -> None:
    for planted in ('if name == "megatron":\n    pass', "import transformers.utils", "use_deepspeed = True"):
        code = _code(f'"""Of Megatron."""\n# and DeepSpeed\n{planted}')
        assert _named(code) == [planted.splitlines()[0].replace('"', "'")]


# Megatron cuts its batches itself, in its own layout, which its room therefore knows by name.
HOMES = {
    "layout": (frozenset(LAYOUTS), ("sequence.layout", "strategy", "megatron")),
    "schedule": (frozenset(SCHEDULES), ("schedule", "strategy")),
}


def _names_in(source: str, names: frozenset[str]) -> set[str]:
    """The names that a source has as texts, or imports; not in docstrings, nor as methods such as `contiguous`."""
    tree = ast.parse(source)
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return found & names


def _strangers(kind: str, sources: Mapping[str, str]) -> list[str]:
    """The modules that name one of a kind outside its home; `burst_plugin` itself exports all that is public."""
    names, homes = HOMES[kind]
    return [
        f"{module} names {', '.join(sorted(found))}"
        for module, source in sources.items()
        if module != "burst_plugin"
        and not f"{module}.".startswith(tuple(f"burst_plugin.{home}." for home in homes))
        and (found := _names_in(source, names))
    ]


@pytest.mark.parametrize("kind", HOMES)
def test_layouts_and_schedules_are_named_at_home_only(kind: str) -> None:
    assert _strangers(kind, {module: path.read_text() for module, path in MODULES.items()}) == []


@pytest.mark.parametrize(
    ("kind", "planted"),
    [
        ("layout", 'for layout in ("zigzag", "striped"):\n    pass\n'),
        ("schedule", 'is_sparse = schedule.name == "direct"\n'),
        ("schedule", "from burst_plugin.schedule.rings import flat_ring\n"),
    ],
)
def test_a_layout_or_schedule_that_is_named_elsewhere_is_found(kind: str, planted: str) -> None:
    assert len(_strangers(kind, {"burst_plugin.assignment.balance": planted})) == 1


_FACTORIES = re.compile(
    "arange|as_tensor|asarray|empty|empty_strided|eye|full|linspace|ones|rand|randint|randn|randperm|scalar_tensor|"
    "tensor|tril_indices|triu_indices|zeros"
)


def _without_device(source: str) -> list[str]:
    """Return the calls that make a tensor wherever PyTorch's default device is by then."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and _FACTORIES.fullmatch(node.func.attr)
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_tensor_that_is_made_says_on_which_device() -> None:
    """Megatron's own tensors follow its conventions, and its room with them."""
    for module, path in _modules():
        assert _room(module) == "megatron" or not _without_device(path.read_text(encoding="utf-8")), module
    planted = "torch.arange(3)\ntorch.zeros(2, device=x.device)\nx.new_zeros(2)\ntorch.empty(4, dtype=torch.int8)"
    assert _without_device(planted) == ["torch.arange(3)", "torch.empty(4, dtype=torch.int8)"]


def test_every_file_is_on_the_page_about_the_house() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    for path in MODULES.values():
        if path.name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"[`/]{re.escape(path.name)}`", page), path.relative_to(PACKAGE)
    for named in re.findall(r"`((?:\w+/)*\w+\.py)`", page):
        assert named.startswith("tests/") or any(str(path).endswith(f"/{named}") for path in MODULES.values()), named


# Private names of PyTorch, transformers and named tuples, some of which the package sets or has, too.
_OTHERS = {"_attn_implementation", "_base", "_device", "_devices", "_loss_function", "_modules", "_replace"}
_OTHERS |= {"_rank", "_timeout", "_version"}


def _defined(tree: ast.AST) -> set[str]:
    """Return the private names of functions, classes, variables and attributes that a source makes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if re.fullmatch(r"_[a-zA-Z]\w*", name)}


@cache
def _private_names() -> set[str]:
    """Return the private names of the package."""
    return set().union(*(_defined(ast.parse(path.read_text())) for path in MODULES.values())) - _OTHERS


def _private_names_used(source: str) -> Iterator[str]:
    """Yield the private names of the package that a test imports, patches, or uses as attributes, once for each use.

    Not attributes of `self` that the test makes, nor of what it imports from elsewhere.
    """
    tree, private = ast.parse(source), _private_names()
    own = _defined(tree)
    imports = {True: set[str](), False: set[str]()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            is_ours = isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "burst_plugin"
            imports[is_ours] |= {alias.name if is_ours else alias.asname or alias.name for alias in node.names}
    yield from imports[True] & private
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            owner = ast.unparse(node.value)
            if owner.split(".")[0] not in imports[False] and not (owner == "self" and node.attr in own):
                yield node.attr
        elif isinstance(node, ast.Call | ast.Tuple):  # patch.object(owner, "_name"), or (owner, "_name", value)
            given = node.args if isinstance(node, ast.Call) else node.elts[1:2]
            texts = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            patched = [text.rpartition(".") for text in texts if re.fullmatch(r"(burst_plugin\.[\w.]+)?\w+", text)]
            yield from (name for _, _, name in patched if name in private)
        elif isinstance(node, ast.keyword) and node.arg in private:  # patch.multiple(owner, _name=value)
            yield node.arg


def test_tests_use_few_private_names_of_the_package() -> None:
    """So that what is behind its interfaces can change without tests. Lower the bound; never raise it."""
    tests = sorted(Path(__file__).parent.rglob("*.py"))
    found = Counter(name for path in tests for name in _private_names_used(path.read_text()))
    assert found.total() <= 58, found.most_common()


@pytest.mark.parametrize(
    "planted",
    [
        "from burst_plugin.run import _execute",
        "ring._endings.clear()",
        'patch.setattr(RingPass, "_arrive", None)',
        'mock.patch("burst_plugin.run._leave")',
        'faults = [(RingPass, "_arrive", None)]',
        "mock.patch.multiple(run, _leave=None)",
    ],
)
def test_a_private_name_in_a_test_is_found(planted: str) -> None:
    allowed = "import torch\ntorch._arrive\nself._arrive = self._arrive\npath._replace(name)\n"
    assert len(list(_private_names_used(allowed + planted))) == 1
