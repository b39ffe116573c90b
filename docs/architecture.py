"""The architecture in figures and as a picture, both read from the source.

``python docs/architecture.py`` prints the figures. ``python tests/pages.py`` writes the picture.
"""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "isentropic"

# The components by the beginnings of the names of their modules. The longest one decides.
COMPONENTS = {
    "cli": "integrations",
    "integrations": "integrations",
    "plots": "plots",
    "layers": "layers",
    "drift": "drift",
    "theory": "theory",
    "_quadrature": "theory",
    "_special": "theory",
    "_attention.functions": "attention",
    "_attention.distribution": "attention",
    "_attention.divergences": "attention",
    "_factors": "attention",
    "_attention.backends": "backends",
    "_attention.numpy": "NumPy",
    "_attention.torch": "PyTorch",
    "_attention.jax": "JAX",
    "_attention.triton": "Triton",
    "_attention.generic": "generic",
    "_attention.tile": "tile program",
    "_attention.schedule": "tile program",
    "_attention.state": "states",
    "_attention.statistics": "states",
    "_attention.plan": "plan",
    "_attention.torch_facts": "plan",
    "_attention.nonfinite": "plan",
    "jl": "jl",
    "_row_maps": "jl",
    "laws": "laws",
    "masks": "masks",
    "_entropy": "entropy",
    "_divergences": "entropy",
    "_ops": "operations",
    "": "foundations",
}
# Where a component stands in the picture, from left to right; 4 where it is not named.
COLUMNS = {
    "integrations": 3.9, "plots": 5.0, "layers": 7.2, "drift": 5.0, "JAX": 1.3, "Triton": 2.6,
    "plan": 2.6, "entropy": 4.5, "theory": 6.1, "laws": 2.2, "masks": 3.6, "operations": 5.5, "jl": 7.0,
}  # fmt: skip
# Libraries have their own code here. Elsewhere a condition on one is an exception to keep in mind.
OF_LIBRARIES = (
    "_attention.numpy", "_attention.torch", "_attention.jax", "_attention.triton",
    "_attention.backends", "_attention.nonfinite",
    "_ops", "_products", "_loops", "_row_maps", "_namespace", "_pytrees", "_mlx", "_jax_modes",
    "_threads", "_torch_nodes", "_torch_products", "_triton_launch", "jl._triton_hadamard",
    "integrations",
)  # fmt: skip
QUESTIONS = {"is_torch", "is_jax", "is_numpy", "is_cupy", "is_torch_array", "is_gpu"}
OPTIONS = {"mask", "bias", "is_causal", "scale", "law", "n_keys", "softcap", "sinks", "enable_gqa"}


def modules() -> dict[str, ast.Module]:
    """The syntax trees of all modules by name, without the name of the package."""
    names = {path: path.relative_to(SOURCE).with_suffix("") for path in sorted(SOURCE.rglob("*.py"))}
    return {
        ".".join(name.parts).removesuffix("__init__").removesuffix("."): ast.parse(path.read_text())
        for path, name in names.items()
    }


def lines(text: str) -> Counter[str]:
    """The numbers of lines of code, docstrings and comments, and of empty lines.

    "reason" counts all comments, also those behind code, except for instructions to tools.
    """
    kinds, reasons = ["code" if line.strip() else "empty" for line in text.splitlines()], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            reasons += not token.string.lstrip("# ").startswith(("fmt:", "noqa", "type:"))
            if token.line.lstrip().startswith("#"):
                kinds[token.start[0] - 1] = "comment"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            first = node.body[0]
            for i in range(first.lineno - 1, first.end_lineno or 0):
                kinds[i] = "docstring"
    return Counter(kinds) + Counter(reason=reasons)


def public_names(tree: ast.Module) -> list[str]:
    """``__all__`` of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def conditions(tree: ast.AST) -> int:
    """How often a condition asks for the library of an array."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.comprehension):
            tests = node.ifs if isinstance(node, ast.comprehension) else [node.test]
            count += any(_asks(x) for test in tests for x in ast.walk(test))
    return count


def _asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in QUESTIONS
    return isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("library")


def is_of_library(module: str) -> bool:
    return any(module == x or module.startswith((f"{x}.", f"{x}_")) for x in OF_LIBRARIES)


def figures() -> dict[str, int | str]:
    """What the source is measured by."""
    trees, total = modules(), Counter[str]()
    for path in SOURCE.rglob("*.py"):
        total += lines(path.read_text())
    names = {module: public_names(tree) for module, tree in trees.items()}
    parts = {"laws", "masks", "jl", "layers", "theory", "drift", "plots", "integrations"}
    functions = [
        (f"{module}.{node.name}", node)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    signatures = [name for name, x in functions if {a.arg for a in x.args.kwonlyargs} >= OPTIONS]
    asked = {m: conditions(tree) for m, tree in trees.items() if not is_of_library(m)}
    share = total.pop("reason") / total["code"]
    return {
        "lines of src": sum(total.values()),
        **{f"  {kind}": number for kind, number in total.most_common()},
        "lines of _attention": sum(
            len(path.read_text().splitlines()) for path in (SOURCE / "_attention").glob("*.py")
        ),
        "comments, per line of code": f"{share:.1%}",
        "modules": len(trees),
        "public names at the top level": len(names[""]),
        "public names": sum(map(len, names.values())) - len(parts & set(names[""])),
        "signatures with the options of attention": len(signatures),
        "conditions on a library outside of its own code": sum(asked.values()),
        "  most of them in": ", ".join(f"{m} {n}" for m, n in Counter(asked).most_common(4)),
        "lines of tests": sum(
            len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")
        ),
    }


def component_of(module: str) -> str:
    found = [x for x in COMPONENTS if module == x or module.startswith((f"{x}.", f"{x}_")) or not x]
    return COMPONENTS[max(found, key=len)]


def imports(trees: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Pairs of modules of which the first imports the second, also within a function."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("isentropic"):
                source = (node.module or "").removeprefix("isentropic").removeprefix(".")
                for alias in node.names:
                    inner = f"{source}.{alias.name}".removeprefix(".")
                    yield module, inner if inner in trees else source


def levels(edges: dict[str, set[str]]) -> dict[str, int]:
    """The height of each component: one more than that of the highest component that it imports."""
    heights: dict[str, int] = {}

    def height(component: str) -> int:
        if component not in heights:
            heights[component] = 0
            heights[component] = max((height(x) + 1 for x in edges[component]), default=0)
        return heights[component]

    top = max(map(height, edges))
    imported = set().union(*edges.values())
    return {component: heights[component] if component in imported else top for component in edges}


def components() -> dict[str, set[str]]:
    """What each component imports directly, without what it also reaches through others."""
    trees = {name: tree for name, tree in modules().items() if name not in ("", "__main__")}
    edges: dict[str, set[str]] = {component_of(name): set() for name in trees}
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    exceptions = rules[0].get("ignore_imports", ())
    for a, b in imports(trees):
        is_exception = f"isentropic.{a} -> isentropic.{b}" in exceptions
        if b and component_of(a) != component_of(b) and not is_exception:
            edges[component_of(a)].add(component_of(b))

    def reached(component: str) -> set[str]:
        return edges[component].union(*(reached(x) for x in edges[component]))

    return {component: to - set().union(*(reached(x) for x in to)) for component, to in edges.items()}


def picture() -> str:
    """The components as SVG: what a component imports is below it."""
    edges = components()
    heights = levels(edges)
    width, across, down, top = 900, 112, 62, max(heights.values())
    places = {
        component: (width / 8 * COLUMNS.get(component, 4), 34 + down * (top - heights[component]))
        for component in edges
    }
    shapes = []
    for component, others in edges.items():
        x, y = places[component]
        for other in sorted(others):
            u, v = places[other]
            shapes.append(
                f'<path d="M{x:.0f} {y + 15} C{x:.0f} {y + 45} {u:.0f} {v - 45} {u:.0f} {v - 15}"/>'
            )
    for component, (x, y) in places.items():
        shapes.append(
            f'<rect x="{x - across / 2:.0f}" y="{y - 15}" width="{across}" height="30" rx="6"/>'
            f'<text x="{x:.0f}" y="{y + 5}">{component}</text>'
        )
    style = (
        "path{fill:none;stroke:#8a94a6;stroke-width:1.3}rect{fill:#eaf0fb;stroke:#4a6fb5}"
        "text{font:14px sans-serif;text-anchor:middle;fill:#1b2a4a}"
    )
    height = 34 + down * top + 34
    title = "The components of the package: each imports those below that it is connected with"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{title}</title><style>{style}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def main() -> None:
    for name, figure in figures().items():
        print(f"{name:50} {figure}")


if __name__ == "__main__":
    main()
