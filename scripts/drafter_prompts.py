"""Prompts for training a drafter (`dspark-jax train --prompts`) out of local files: Python functions and lists of questions.

    python scripts/drafter_prompts.py --out prompts.jsonl --functions ./algorithms --questions codegen.json --sums train.jsonl

`--functions` are folders of Python files: functions with a docstring become programming exercises (heads and docstrings without
a body) and questions about code; without any it takes the standard library. `--questions` and `--sums` are JSON lists or JSONL
files whose entries have `question`, `instruction` or `prompt` (and perhaps `input`); sums get a sentence that asks for steps.
The same files and seed give the same prompts. What stands in a file of `--exclude` (evaluation prompts) is left out.
"""

import argparse
import ast
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

EXERCISE = (
    "Complete this Python function:\n```python\n{}\n```",
    "Implement the following function in Python.\n```python\n{}\n```",
    "Solve this problem and check your solution against the examples:\n```python\n{}\n```",
    "Write the body of this function:\n\n{}",
    "Please finish the code below, and explain it briefly.\n```python\n{}\n```",
    "{}",
)
ABOUT = (
    "Explain what this code does:\n```python\n{}\n```",
    "Write unit tests for this function:\n```python\n{}\n```",
    "Is there a bug in this code? How would you improve it?\n```python\n{}\n```",
    "How would you use this in a program? Give an example.\n```python\n{}\n```",
)
SUM = (
    "{}\nThink step by step and give the final answer in \\boxed{{}}.",
    "{} Let's reason step by step, and put the answer in \\boxed{{}} at the end.",
    "{}\nShow each step, then write the result within \\boxed{{}}.",
    "Solve this problem, showing each step: {}",
    "{}",
)


def functions(folders: list[Path], most: int = 600) -> Iterator[tuple[str, str]]:
    """Top-level functions with a docstring and a stub of at most `most` characters: the whole, cut there, and the stub."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if "test" in str(path.relative_to(folder)) or path.stat().st_size > 500_000:
                continue
            try:
                text = path.read_text(encoding="utf-8")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # other people's escapes
                    tree = ast.parse(text)
            except (SyntaxError, UnicodeDecodeError, ValueError):
                continue
            lines = text.splitlines()
            for node in tree.body:
                if not isinstance(node, ast.FunctionDef) or len(ast.get_docstring(node) or "") < 40:
                    continue
                stub = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                if len(stub) <= most:
                    yield "\n".join(lines[node.lineno - 1 : node.end_lineno])[:most], stub


def questions(paths: list[Path]) -> Iterator[str]:
    """What the entries of JSON or JSONL files ask."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x.strip()]
        for number, entry in enumerate(entries):
            found = next((entry[k] for k in ("question", "instruction", "prompt") if isinstance(entry.get(k), str)), None)
            if found is None:
                raise SystemExit(f"{path}: entry {number} has none of question, instruction and prompt; give files that do")
            yield f"{found}\n{entry['input']}" if entry.get("input") else found


def prompts(known: list[tuple[str, str]], asked: list[str], sums: list[str], count: int, seed: int) -> list[str]:
    """At most `count` prompts, no two the same: exercises, sums, and the others in turn, each source shuffled and used again in
    another frame when it is at its end.
    """
    rng = random.Random(seed)
    others = [(text, ("{}",)) for text in asked] + [(whole, ABOUT) for whole, _ in known[: len(asked) // 3 or None]]
    kinds = [[(stub, EXERCISE) for _, stub in known], [(text, SUM) for text in sums], others]
    kinds = [kind for kind in kinds if kind]
    found: dict[str, None] = {}
    for kind in kinds:
        rng.shuffle(kind)
    for turn in range(4 * count):
        kind = kinds[turn % len(kinds)]
        text, frames = kind[turn // len(kinds) % len(kind)]
        found[rng.choice(frames).format(text)] = None
        if len(found) == count:
            break
    return list(found)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--functions", type=Path, nargs="+", default=[Path(sysconfig.get_path("stdlib"))])
    for name in ("questions", "sums", "exclude"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    # A problem of the evaluation is left out in any frame, so its words are compared, not the whole prompt.
    banned = "\n".join(path.read_text(encoding="utf-8") for path in args.exclude)
    kept = [x for x in questions(args.sums) if json.dumps(x, ensure_ascii=False)[1:-1] not in banned]
    known = [(a, b) for a, b in functions(args.functions) if json.dumps(b, ensure_ascii=False)[1:-1] not in banned]
    found = prompts(known, list(questions(args.questions)), kept, args.count, args.seed)
    args.out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in found), encoding="utf-8")
    print(f"{len(found)} prompts of {len(known)} functions, {len(kept)} sums and {len(args.questions)} files of questions")


if __name__ == "__main__":
    main()
