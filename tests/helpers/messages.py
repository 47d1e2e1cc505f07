"""Texts in the package's source, for pages that quote them."""

import ast
import functools
import re

from helpers.pages import ROOT

HOLE = "\0"


@functools.cache
def texts() -> str:
    """All texts of the package and the kernels but for docstrings, a line each; values inside f-strings are HOLE."""
    files = [*(ROOT / "dspark_jax").rglob("*.py"), *(ROOT / "kernels" / "dspark_kernels").rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = [_text(node) for node in nodes if id(node) not in docstrings]
    return "\n".join(text.replace("\n", " ") for text in found if text)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) or HOLE for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def occurs(quoted: str) -> bool:
    """Whether one text has all parts of `quoted` between the marks `…`, in order."""
    parts = [re.escape(part.strip()) for part in quoted.split("…") if part.strip()]
    return re.search("[^\n]*".join(parts), texts()) is not None
