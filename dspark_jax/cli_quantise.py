"""`dspark-jax quantise`: a model in the published files' formats, and what its tokens lose by that."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_jax.cli_devices import EmulateOption, MeshOption, chosen_mesh
from dspark_jax.cli_guard import guarded
from dspark_jax.cli_mesh import size
from dspark_jax.errors import CheckpointError, ConfigError, RequestError

if TYPE_CHECKING:
    from dspark_jax.agreement import Agreement


@guarded
def quantise(
    model: Annotated[str, typer.Argument(help="A shipped model's name, or a checkpoint folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    prompts: Annotated[
        Path | None, typer.Option(help='Compare both models\' tokens on this JSONL file: on each line a "prompt".')
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 64,
    mesh: MeshOption = None,
    emulate_devices: EmulateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write a model with fp8 linear maps and fp4 experts, as DeepSeek's files have them; --prompts measures the loss."""
    from dspark_jax.api import load, model_folder
    from dspark_jax.cli_display import Display
    from dspark_jax.evaluate import read_prompts

    folder = model_folder(model)
    if max_tokens < 1:
        raise RequestError(f"--max-tokens is {max_tokens}; expected at least 1")
    texts = None if prompts is None else [p.prompt for p in read_prompts(prompts)]
    if not out.parent.is_dir():
        raise RequestError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}; make it, or choose another path")
    if out.exists() and (not out.is_dir() or out.resolve() == folder.resolve()):
        raise CheckpointError(f"--out {str(out)!r} is the model itself or a file; choose another path")
    if prompts is None and (mesh is not None or emulate_devices is not None):
        raise RequestError("--mesh is for the comparison, and without --prompts there is none; remove it, or add --prompts")
    shape, devices = chosen_mesh(mesh, emulate_devices)
    if shape.pipe > 1:
        raise ConfigError(
            f"quantise compares by passes over whole texts, which pipeline ranks do not make, and mesh {shape} has pipe ="
            f" {shape.pipe}; use 1x{shape.devices}: the tokens are the same on every mesh"
        )
    stored = _write(folder, out)
    found: dict[str, Any] = {"model": model, "out": str(out), "stored": stored}
    agreed = None
    if texts is not None:
        from dspark_jax.agreement import agreement

        # In float32 on every device: only the weights differ.
        with Display().waiting("comparing"):
            reference, other = (load(path, mesh=devices, dtype="float32") for path in (folder, out))
            agreed = agreement(reference, other, texts, max_tokens=max_tokens)
        found |= {"max_tokens": max_tokens, **agreed.as_dict()}
    if as_json:
        print(json.dumps(found))
    else:
        _show(out, stored, agreed)


def _write(folder: Path, out: Path) -> dict[str, int]:
    """Quantises; returns the bytes of the written tensors by dtype."""
    from dspark_jax.checkpoint.files import open_files, stored_bytes
    from dspark_jax.checkpoint.reader import read_checkpoint, read_tokenizer
    from dspark_jax.checkpoint.writer import write_checkpoint
    from dspark_jax.config_dense import v4_config

    read_tokenizer(folder)  # refuses a folder without one
    read = read_checkpoint(folder, dtype="float32")
    write_checkpoint(out, v4_config(read.config, str(folder)), read.draft, read.params, quantise=True)
    shutil.copy(folder / "tokenizer.json", out / "tokenizer.json")
    return stored_bytes(open_files(out))


def _show(out: Path, stored: dict[str, int], agreed: "Agreement | None") -> None:
    parts = ", ".join(f"{name} {size(count)}" for name, count in sorted(stored.items(), key=lambda x: -x[1]))
    print(f"wrote {out}: {size(sum(stored.values()))} ({parts})")
    if agreed is None:
        return
    print(f"top-1 agreement   {agreed.same / agreed.tokens:.2%} of {agreed.tokens} tokens behind the same text")
    print(f"same whole texts  {agreed.same_texts} of {agreed.prompts}")
    if agreed.tau is not None and agreed.other_tau is not None:
        print(f"tokens a round    {agreed.other_tau:.3f}, before {agreed.tau:.3f}")
