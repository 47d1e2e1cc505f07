"""Every public name says what it is: those of all modules, and the members of the classes in the API reference."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from helpers.pages import ROOT

SOURCES = [*(ROOT / "dspark_jax").rglob("*.py"), *(ROOT / "kernels" / "dspark_kernels").rglob("*.py")]
PAGES = [page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))]
REFERENCE = [name for page in PAGES for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)]


def resolved(name: str) -> Any:
    """The module, class or function of a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)


def classes(found: Any) -> Iterator[type]:
    """The classes that a page of the reference shows for an entry."""
    if inspect.isclass(found):
        yield found
    if isinstance(found, ModuleType):
        shown = [getattr(found, name) for name in getattr(found, "__all__", vars(found)) if not name.startswith("_")]
        own = [one for one in shown if inspect.isclass(one)]
        yield from (one for one in own if one.__module__.startswith(found.__name__))


def silent(kind: type) -> Iterator[str]:
    """Public methods and properties of our own without a docstring, the inherited ones included."""
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        code = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        ours = inspect.isfunction(code) and code.__module__.startswith("dspark_")
        if ours and not name.startswith("_") and not inspect.getdoc(getattr(kind, name)):
            yield f"{kind.__module__}.{kind.__name__}.{name}"


def test_modules_classes_and_functions_have_docstrings():
    missing = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        public = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]
        missing += [f"{path.relative_to(ROOT)}: {getattr(n, 'name', '')}" for n in [tree, *public] if not ast.get_docstring(n)]
    assert missing == []


def test_members_in_the_api_reference_have_docstrings():
    found = [kind for name in REFERENCE for kind in classes(resolved(name))]
    assert len(found) > 90
    assert sorted({name for kind in found for name in silent(kind)}) == []


def test_what_is_missing_would_be_found():
    kind = type("Kind", (), {"plain": lambda self: None, "said": property(lambda self: None, doc="Says it.")})
    kind.plain.__module__ = "dspark_jax.nowhere"
    assert [name.rpartition(".")[2] for name in silent(kind)] == ["plain"]
