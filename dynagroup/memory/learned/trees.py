"""Files of trees, checked before XGBoost reads them: it trusts what it loads, and a damaged file can end the process.

A file is parsed here, within its own bounds, and held against what an ensemble of regression trees must be: every index
points into its array, every node but the root is the child of exactly one node before it. Cost: one visit of every number.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

import numpy as np

__all__ = ["NotTrees", "check_trees"]

_NUMBERS = {b"i": ">i1", b"U": ">u1", b"I": ">i2", b"l": ">i4", b"L": ">i8", b"d": ">f4", b"D": ">f8"}
_INTEGERS = (b"i", b"U", b"I", b"l", b"L")
_DEEPEST = 32
_ROOT = 2**31 - 1
_PER_NODE = ("base_weights", "default_left", "left_children", "loss_changes", "parents", "right_children",
             "split_conditions", "split_indices", "split_type", "sum_hessian")  # fmt: skip
_CATEGORIES = ("categories", "categories_nodes", "categories_segments", "categories_sizes")
_OBJECTIVES = ("reg:squarederror", "reg:quantileerror")


class NotTrees(ValueError):
    """What is wrong with the file."""


def check_trees(raw: bytes, num_features: int) -> None:
    """Raises NotTrees unless these bytes are regression trees over so many features, in XGBoost's UBJSON.

    >>> check_trees(b"{}", 3)
    Traceback (most recent call last):
    dynagroup.memory.learned.trees.NotTrees: the model has no 'learner'
    """
    reader = _Reader(raw)
    document = reader.value(0)
    if reader.place != len(raw):
        _refuse(f"{len(raw) - reader.place} bytes follow the model")
    learner = _field(document, "learner", dict)
    version = _field(document, "version", (list, np.ndarray))
    if len(version) != 3 or not all(int(v) == v and v >= 0 for v in version):
        _refuse("its version is no three numbers")
    parameters = _field(learner, "learner_model_param", dict)
    expected = {"num_feature": str(num_features), "num_class": "0", "num_target": "1"}
    for name, value in expected.items():
        if parameters.get(name) != value:
            _refuse(f"`{name}` is {parameters.get(name)!r}, not {value!r}")
    if _field(learner, "objective", dict).get("name") not in _OBJECTIVES:
        _refuse(f"its objective is none of {_OBJECTIVES}")
    _check_texts(parameters, "learner_model_param")
    _check_texts(learner["objective"], "objective")
    if _field(learner, "attributes", dict) or len(_field(learner, "feature_names", (list, np.ndarray))):
        _refuse("it names features")
    booster = _field(learner, "gradient_booster", dict)
    if booster.get("name") != "gbtree":
        _refuse(f"its booster is {booster.get('name')!r}, not 'gbtree'")
    _check_ensemble(_field(booster, "model", dict), num_features)


def _check_ensemble(model: dict[str, Any], num_features: int) -> None:
    trees = _field(model, "trees", list)
    parameters = _field(model, "gbtree_model_param", dict)
    if parameters.get("num_trees") != str(len(trees)) or parameters.get("num_parallel_tree") != "1":
        _refuse(f"it says {parameters.get('num_trees')!r} trees and has {len(trees)}")
    groups = _integers(model, "tree_info", len(trees))
    rounds = _integers(model, "iteration_indptr", None)
    if groups.any() or rounds.tolist() != list(range(len(trees) + 1)):
        _refuse("its trees are not one a round, for one target")
    for name, values in _field(model, "cats", dict).items():
        if len(values):
            _refuse(f"it has categories ({name})")
    for number, tree in enumerate(trees):
        if not isinstance(tree, dict) or tree.get("id") != number:
            _refuse(f"tree {number} is none")
        _check_tree(tree, num_features, f"tree {number}")


def _check_tree(tree: dict[str, Any], num_features: int, where: str) -> None:
    parameters = _field(tree, "tree_param", dict)
    _check_texts(parameters, where)
    size = len(_field(tree, "left_children", (list, np.ndarray)))
    known = {"num_nodes": str(size), "num_feature": str(num_features), "num_deleted": "0", "size_leaf_vector": "1"}
    if size < 1 or parameters != known:
        _refuse(f"{where}: its sizes are {parameters}, not {known}")
    for name in _PER_NODE:
        values = np.asarray(_field(tree, name, (list, np.ndarray)))
        if values.shape != (size,) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
            _refuse(f"{where}: `{name}` is no {size} finite numbers")
    for name in _CATEGORIES:
        if len(_field(tree, name, (list, np.ndarray))):
            _refuse(f"{where} has categories")
    left, right, parents = (_integers(tree, name, size) for name in ("left_children", "right_children", "parents"))
    splits, kinds = _integers(tree, "split_indices", size), _integers(tree, "split_type", size)
    inner = np.flatnonzero(left != -1)
    children = np.concatenate([left[inner], right[inner]])
    if ((left == -1) != (right == -1)).any() or sorted(children.tolist()) != list(range(1, size)):
        _refuse(f"{where}: its nodes are not each the child of one other")
    if (left[inner] <= inner).any() or (right[inner] <= inner).any() or parents[0] != _ROOT:
        _refuse(f"{where}: a child stands before its parent")
    if (parents[left[inner]] != inner).any() or (parents[right[inner]] != inner).any():
        _refuse(f"{where}: parents and children disagree")
    if (splits < 0).any() or (splits >= num_features).any() or kinds.any():
        _refuse(f"{where}: it splits at a feature that there is not")


def _check_texts(values: dict[str, Any], where: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _check_texts(value, where)
        elif not isinstance(value, str) or len(value) > 64 or not value.isprintable():
            _refuse(f"{where}: `{name}` is no short text")


def _field(values: Any, name: str, kind: Any) -> Any:
    if not isinstance(values, dict) or name not in values:
        _refuse(f"the model has no {name!r}")
    if not isinstance(values[name], kind):
        _refuse(f"`{name}` is {type(values[name]).__name__}")
    return values[name]


def _integers(values: dict[str, Any], name: str, size: int | None) -> np.ndarray:
    found = np.asarray(_field(values, name, (list, np.ndarray)))
    if found.ndim != 1 or (size is not None and len(found) != size) or (len(found) and found.dtype.kind not in "iu"):
        _refuse(f"`{name}` is no list of {'' if size is None else size} integers")
    return found.astype(np.int64)


def _refuse(reason: str) -> NoReturn:
    raise NotTrees(reason)


class _Reader:
    """UBJSON, as far as XGBoost writes it: objects, lists, texts, numbers, and arrays of numbers of one type."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.place = raw, 0

    def value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            _refuse("it is nested too deeply")
        marker = self._take(1)
        if marker == b"{":
            return self._object(depth)
        if marker == b"[":
            return self._list(depth)
        if marker == b"S":
            return self._text()
        if marker in _NUMBERS:
            return self._number(marker)
        _refuse(f"byte {self.place - 1} is no value that XGBoost writes ({marker!r})")

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._peek() != b"}":
            name = self._text()
            if name in found:
                _refuse(f"it says {name!r} twice")
            found[name] = self.value(depth + 1)
        self.place += 1
        return found

    def _list(self, depth: int) -> list[Any] | np.ndarray:
        kind = None
        if self._peek() == b"$":
            self.place += 1
            kind = self._take(1)
            if kind not in _NUMBERS or self._peek() != b"#":
                _refuse(f"byte {self.place} begins no array of numbers")
        if self._peek() == b"#":
            self.place += 1
            size = self._size()
            if kind is not None:
                dtype = np.dtype(_NUMBERS[kind])
                return np.frombuffer(self._take(size * dtype.itemsize), dtype)
            return [self.value(depth + 1) for _ in range(self._bounded(size))]
        found: list[Any] = []
        while self._peek() != b"]":
            found.append(self.value(depth + 1))
        self.place += 1
        return found

    def _text(self) -> str:
        if self._peek() == b"S":
            self.place += 1
        try:
            return self._take(self._size()).decode("utf-8")
        except UnicodeDecodeError:
            _refuse("a text is not UTF-8")

    def _size(self) -> int:
        marker = self._take(1)
        if marker not in _INTEGERS:
            _refuse(f"byte {self.place - 1} is no size")
        return self._bounded(self._number(marker))

    def _bounded(self, size: int) -> int:
        if not 0 <= size <= len(self.raw) - self.place:
            _refuse(f"a part claims {size} elements, beyond the end of the file")
        return size

    def _number(self, marker: bytes) -> Any:
        dtype = np.dtype(_NUMBERS[marker])
        return struct.unpack(
            f">{dtype.char}" if dtype.itemsize < 8 or dtype.kind == "f" else ">q", self._take(dtype.itemsize)
        )[0]

    def _peek(self) -> bytes:
        return self.raw[self.place : self.place + 1]

    def _take(self, count: int) -> bytes:
        if count > len(self.raw) - self.place:
            _refuse("it ends too early")
        self.place += count
        return self.raw[self.place - count : self.place]
