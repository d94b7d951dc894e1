"""How plain Python is, by measures that a formatter cannot change.

usage: python plain.py PATH ... [--list FORM] [--worst N]
    PATH: a file or folder; each folder below the first has a line of its own.
    --list: prints the places of one form. --worst: prints the hardest functions.

A statement's size is its number of AST nodes. Operators, contexts, annotations and docstrings do not
count; a compound statement counts by its header.
"""

import ast
import os
import sys
from collections import Counter

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
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
INTROSPECTION = (
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
)


def size(node):
    return sum(not isinstance(one, SKIPPED) for one in ast.walk(node))


def statements(tree):
    """Yields (statement, size), headers of compound statements too."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(
            node,
            (
                ast.FunctionDef,
                ast.AsyncFunctionDef,
                ast.ClassDef,
                ast.Import,
                ast.ImportFrom,
                ast.Try,
                ast.Match,
            ),
        ):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, (ast.If, ast.While)):
            yield node, size(node.test) + 1
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            yield node, size(node.target) + size(node.iter) + 1
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            yield node, sum(map(size, node.items)) + 1
        elif isinstance(node, ast.AnnAssign):
            yield node, size(node) - size(node.annotation)
        else:
            yield node, size(node)


def inside(node, kinds):
    return [one for one in ast.walk(node) if isinstance(one, kinds) and one is not node]


def forms(tree):
    """Yields (form, line) of what hides two thoughts in one statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            value, target = node.value, node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                swap = {
                    ast.dump(x, annotate_fields=False).replace("Store", "Load") for x in target.elts
                } == {ast.dump(x, annotate_fields=False) for x in value.elts}
                if not swap:
                    yield "tuple assignment", node.lineno
            if isinstance(value, ast.Lambda):
                yield "stored lambda", node.lineno
        elif isinstance(node, ast.IfExp):
            if inside(node, ast.IfExp):
                yield "nested ternary", node.lineno
        elif isinstance(node, ast.JoinedStr):
            if inside(node, (ast.IfExp, *COMPREHENSIONS)):
                yield "ternary or comprehension in an f-string", node.lineno
        elif isinstance(node, COMPREHENSIONS):
            if len(node.generators) > 1:
                yield "two loops in a comprehension", node.lineno
            if inside(node, ast.NamedExpr):
                yield "walrus in a comprehension", node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if (
                    isinstance(one, (ast.List, ast.Constant))
                    and (isinstance(one, ast.List) or isinstance(one.value, str))
                    and isinstance(other, (ast.Compare, ast.BoolOp))
                ):
                    yield "list or text times a condition", node.lineno
        elif (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.BitOr)
            and isinstance(node.value, (ast.Dict, ast.DictComp))
        ):
            yield "dict of arguments merged", node.lineno
        elif isinstance(node, ast.Call):
            if any(word.arg is None and isinstance(word.value, ast.Name) for word in node.keywords):
                yield "** of a dict into a call", node.lineno
        if (isinstance(node, ast.Attribute) and node.attr in INTROSPECTION) or (
            isinstance(node, ast.Name) and node.id in INTROSPECTION
        ):
            yield "introspection", node.lineno


def cognitive(function):
    """About SonarSource's cognitive complexity: branches, weighed by how deep they stand."""
    score = 0

    def visit(node, depth):
        nonlocal score
        for child in ast.iter_child_nodes(node):
            if isinstance(
                child, (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Match)
            ):
                score += 1 + depth
                visit(child, depth + 1)
            elif isinstance(child, COMPREHENSIONS):
                score += (
                    depth + len(child.generators) + sum(len(one.ifs) for one in child.generators)
                )
                visit(child, depth + 1)
            elif isinstance(child, ast.BoolOp):
                score += 1
                visit(child, depth)
            else:
                visit(child, depth + isinstance(child, (ast.FunctionDef, ast.Lambda)))

    visit(function, 0)
    return score


def python_files(path):
    if os.path.isfile(path):
        return [path]
    return sorted(
        os.path.join(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith(".py")
    )


def measured(paths):
    sizes, counts, nodes, lines, hard = [], Counter(), 0, 0, []
    for path in paths:
        text = open(path, encoding="utf8", errors="replace").read()
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines += len(
            [line for line in text.split("\n") if line.strip() and not line.strip().startswith("#")]
        )
        nodes += size(tree)
        sizes += [one for _, one in statements(tree)]
        counts.update(form for form, _ in forms(tree))
        counts["# fmt: skip"] += text.count("# fmt: skip")
        counts["getattr, hasattr"] += sum(
            isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("getattr", "hasattr")
            for n in ast.walk(tree)
        )
        counts["Any"] += sum(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(tree))
        for n in ast.walk(tree):
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
                hard.append((cognitive(n), path, n.lineno, n.name))
    return sorted(sizes), counts, nodes, lines, hard


def told(name, paths):
    sizes, counts, nodes, lines, hard = measured(paths)
    if not sizes:
        return
    mean = sum(sizes) / len(sizes)
    median = sizes[int(0.5 * (len(sizes) - 1))]
    ninth = sizes[int(0.9 * (len(sizes) - 1))]
    large = sum(size > 20 for size in sizes) / len(sizes)
    complex_functions = sum(one[0] > 15 for one in hard)
    print(
        f"{name:24s} {len(paths):3d} files, {lines:6,d} lines, {nodes:7,d} nodes, "
        f"{len(sizes):6,d} statements; nodes a statement: mean {mean:5.2f}, median {median}, "
        f"p90 {ninth}, above 20 {large:.1%}, most {sizes[-1]}; "
        f"functions of complexity > 15: {complex_functions}"
    )


if __name__ == "__main__":
    asked = [one for one in sys.argv[1:] if not one.startswith("--")]
    if "--list" in sys.argv:
        form = sys.argv[sys.argv.index("--list") + 1]
        asked.remove(form)
        for path in (file for one in asked for file in python_files(one)):
            for found, line in forms(ast.parse(open(path, encoding="utf8").read())):
                if found == form:
                    print(f"{path}:{line}")
        sys.exit()
    if "--worst" in sys.argv:
        number = sys.argv[sys.argv.index("--worst") + 1]
        asked.remove(number)
        found = [one for path in asked for one in measured(python_files(path))[4]]
        for score, path, line, function in sorted(found, reverse=True)[: int(number)]:
            print(f"{score:4d} {path}:{line} {function}")
        sys.exit()
    for one in asked:
        everything = python_files(one)
        told(one.rstrip("/").split("/")[-1], everything)
        if os.path.isdir(one):
            for room in sorted({path[len(one) :].lstrip("/").split("/")[0] for path in everything}):
                below = os.path.join(one, room)
                if os.path.isdir(below):
                    told("  " + room, python_files(below))
        counts, lines = measured(everything)[1], measured(everything)[3]
        print(
            "  " + "; ".join(f"{form} {number}" for form, number in counts.most_common()),
            f"(in {lines:,d} lines)",
        )
