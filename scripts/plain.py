"""How plain Python is, by measures that a formatter cannot change.

usage: python plain.py PATH ... [--list FORM] [--worst N]
    PATH: a file or folder; each folder below the first has a line of its own.
    --list: prints the places of one form. --worst: prints the hardest functions.

A statement's size is its number of AST nodes. Operators, contexts, annotations and docstrings do not
count; a compound statement counts by its header.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED = (
    ast.Load,
    ast.Store,
    ast.Del,
    ast.operator,
    ast.cmpop,
    ast.boolop,
    ast.unaryop,
    ast.arguments,
)
NOT_COUNTED = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Try,
    ast.Match,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
INTROSPECTION = {
    "__code__",
    "co_names",
    "co_varnames",
    "co_consts",
    "co_code",
    "f_locals",
    "f_back",
    "_getframe",
    "getsource",
    "walk_stack",
    "currentframe",
}
LARGE = 20  # nodes of a statement
COMPLEX = 15  # cognitive complexity of a function


def num_nodes(*trees: ast.AST) -> int:
    count = 0
    for tree in trees:
        count += sum(not isinstance(node, SKIPPED) for node in ast.walk(tree))
    return count


def statement_sizes(tree: ast.AST) -> Iterator[int]:
    """Yields the size of each statement, of compound statements that of the header."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, NOT_COUNTED):
            continue
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring:
            continue
        if isinstance(node, (ast.If, ast.While)):
            yield num_nodes(node.test) + 1
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            yield num_nodes(node.target, node.iter) + 1
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            yield num_nodes(*node.items) + 1
        elif isinstance(node, ast.AnnAssign):
            yield num_nodes(node) - num_nodes(node.annotation)
        else:
            yield num_nodes(node)


def contains(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(part, kinds) for part in ast.walk(node) if part is not node)


def is_tuple_assignment(node: ast.Assign) -> bool:
    """Whether several values are assigned at once; a swap is not meant."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    targets = {ast.unparse(part) for part in target.elts}
    values = {ast.unparse(part) for part in node.value.elts}
    return targets != values


def is_repeated_by_condition(node: ast.BinOp) -> bool:
    """Whether a list or a text is multiplied by a condition."""
    if not isinstance(node.op, ast.Mult):
        return False
    for part, other in ((node.left, node.right), (node.right, node.left)):
        is_text = isinstance(part, ast.Constant) and isinstance(part.value, str)
        is_condition = isinstance(other, (ast.Compare, ast.BoolOp))
        if is_condition and (is_text or isinstance(part, ast.List)):
            return True
    return False


def is_dict_merge(node: ast.AugAssign) -> bool:
    return isinstance(node.op, ast.BitOr) and isinstance(node.value, (ast.Dict, ast.DictComp))


def passes_settings(node: ast.Call) -> bool:
    return any(word.arg is None and isinstance(word.value, ast.Name) for word in node.keywords)


def forms_of(node: ast.AST) -> Iterator[str]:
    """Yields what hides two thoughts in one statement."""
    if isinstance(node, ast.Assign) and is_tuple_assignment(node):
        yield "tuple assignment"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        yield "stored lambda"
    if isinstance(node, ast.IfExp) and contains(node, (ast.IfExp,)):
        yield "nested ternary"
    if isinstance(node, ast.JoinedStr) and contains(node, (ast.IfExp, *COMPREHENSIONS)):
        yield "ternary or comprehension in an f-string"
    if isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
        yield "two loops in a comprehension"
    if isinstance(node, COMPREHENSIONS) and contains(node, (ast.NamedExpr,)):
        yield "walrus in a comprehension"
    if isinstance(node, ast.BinOp) and is_repeated_by_condition(node):
        yield "list or text times a condition"
    if isinstance(node, ast.AugAssign) and is_dict_merge(node):
        yield "dict of arguments merged"
    if isinstance(node, ast.Call) and passes_settings(node):
        yield "** of a dict into a call"
    if isinstance(node, ast.Attribute) and node.attr in INTROSPECTION:
        yield "introspection"
    if isinstance(node, ast.Name) and node.id in INTROSPECTION:
        yield "introspection"


def is_call_of(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def complexity(node: ast.AST, depth: int = 0) -> int:
    """About SonarSource's cognitive complexity: branches, weighed by how deep they stand."""
    score = 0
    for child in ast.iter_child_nodes(node):
        inner = depth
        if isinstance(child, BRANCHES):
            score += 1 + depth
            inner += 1
        elif isinstance(child, COMPREHENSIONS):
            conditions = sum(len(loop.ifs) for loop in child.generators)
            score += depth + len(child.generators) + conditions
            inner += 1
        elif isinstance(child, ast.BoolOp):
            score += 1
        elif isinstance(child, (ast.FunctionDef, ast.Lambda)):
            inner += 1
        score += complexity(child, inner)
    return score


@dataclass
class Measured:
    """Figures of some files."""

    num_files: int = 0
    num_lines: int = 0
    num_nodes: int = 0
    sizes: list[int] = field(default_factory=list)  # of statements
    forms: Counter[str] = field(default_factory=Counter)
    functions: list[tuple[int, str]] = field(default_factory=list)  # (complexity, where and name)
    places: list[tuple[str, str]] = field(default_factory=list)  # (form, where)

    def add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text)
        lines = [line.strip() for line in text.split("\n")]
        self.num_files += 1
        self.num_lines += sum(bool(line) and not line.startswith("#") for line in lines)
        self.num_nodes += num_nodes(tree)
        self.sizes += statement_sizes(tree)
        self.forms["# fmt: skip"] += text.count("# fmt: skip")
        for node in ast.walk(tree):
            self._add_node(node, path)

    def _add_node(self, node: ast.AST, path: Path) -> None:
        for form in forms_of(node):
            self.forms[form] += 1
            self.places.append((form, f"{path}:{getattr(node, 'lineno', 0)}"))
        if is_call_of(node, "getattr", "hasattr"):
            self.forms["getattr, hasattr"] += 1
        if isinstance(node, ast.Name) and node.id == "Any":
            self.forms["Any"] += 1
        if isinstance(node, FUNCTIONS):
            self.functions.append((complexity(node), f"{path}:{node.lineno} {node.name}"))

    def line(self, name: str) -> str:
        sizes = sorted(self.sizes)
        if not sizes:
            return (
                f"{name:24s} {self.num_files:3d} files, {self.num_lines:6,d} lines, no statements"
            )
        last = len(sizes) - 1
        mean = sum(sizes) / len(sizes)
        large = sum(size > LARGE for size in sizes) / len(sizes)
        num_complex = sum(score > COMPLEX for score, _ in self.functions)
        return (
            f"{name:24s} {self.num_files:3d} files, {self.num_lines:6,d} lines, "
            f"{self.num_nodes:7,d} nodes, {len(sizes):6,d} statements; nodes a statement: "
            f"mean {mean:5.2f}, median {sizes[int(0.5 * last)]}, p90 {sizes[int(0.9 * last)]}, "
            f"above {LARGE} {large:.1%}, most {sizes[last]}; "
            f"functions of complexity > {COMPLEX}: {num_complex}"
        )


def measured(path: Path) -> Measured:
    result = Measured()
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        result.add(file)
    return result


def print_figures(path: Path) -> None:
    result = measured(path)
    print(result.line(path.name))
    for room in sorted(path.iterdir()) if path.is_dir() else []:
        if room.is_dir() and measured(room).sizes:
            print(measured(room).line(f"  {room.name}"))
    counts = [f"{form} {count}" for form, count in result.forms.most_common()]
    print(f"  {'; '.join(counts)} (in {result.num_lines:,d} lines)")


def main() -> None:
    parser = argparse.ArgumentParser(description="How plain Python is.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--list", metavar="FORM")
    parser.add_argument("--worst", type=int, metavar="N")
    arguments = parser.parse_args()
    for path in arguments.paths:
        if arguments.list is not None:
            places = measured(path).places
            print(*(place for form, place in places if form == arguments.list), sep="\n")
        elif arguments.worst is not None:
            for score, function in sorted(measured(path).functions)[: -arguments.worst - 1 : -1]:
                print(f"{score:4d} {function}")
        else:
            print_figures(path)


if __name__ == "__main__":
    main()
