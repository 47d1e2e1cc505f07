"""A mesh as the user writes it: "2x4" on the command line, or a YAML file that may also name the stages."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dspark_jax.errors import ConfigError, raise_all

if TYPE_CHECKING:
    from jax.sharding import Mesh

_SHAPE = "pipe ranks x expert ranks, as in 2x4"


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes.

    Attributes:
      pipe: ranks that share the layers.
      expert: ranks that share experts, vocabulary and requests.
      stages: layers of the pipe ranks, "0-20,21-42" or "21,22"; None leaves them to the planner.

    Raises:
      ConfigError: listing every value of a wrong type and every axis below 1.
    """

    pipe: int = 1
    expert: int = 1
    stages: str | None = None

    def __post_init__(self) -> None:
        raise_all(ConfigError, "mesh", list(_faults(vars(self))))

    @property
    def devices(self) -> int:
        """How many the mesh takes."""
        return self.pipe * self.expert

    def __str__(self) -> str:
        return f"{self.pipe}x{self.expert}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "mesh") -> "MeshConfig":
        """The fields as a mapping; `stages` may also be the list of layer counts. `source` names it in errors.

        Raises:
          ConfigError: listing every unknown key, every value of a wrong type and every axis below 1.
        """
        known = [f.name for f in fields(cls)]
        found = {key: value for key, value in values.items() if key in known}
        if "stages" in found:
            found["stages"] = _stages(found["stages"])
        unknown = [_unknown(key, known) for key in values if key not in known]
        raise_all(ConfigError, source, [*unknown, *_faults(found)])
        return cls(**found)

    def check_devices(self, count: int) -> None:
        """Raises ConfigError unless the mesh takes exactly `count` devices."""
        if self.devices > count:
            raise ConfigError(
                f"mesh {self} needs {self.devices} devices, but there {'is' if count == 1 else 'are'} {count}; choose a"
                f" smaller mesh, or emulate them on a CPU with --emulate-devices {self.devices}"
            )
        if self.devices < count:
            raise ConfigError(
                f"mesh {self} takes {self.devices} of {count} devices; choose a mesh of {count} (pipe x expert), or"
                " show the program fewer devices (CUDA_VISIBLE_DEVICES)"
            )

    def make(self, devices: Sequence[Any] | None = None) -> "Mesh":
        """The mesh over exactly these devices, by default over all of `jax.devices()`.

        Raises ConfigError if their number is another.
        """
        import jax

        from dspark_jax.parallel.mesh import make_mesh

        available = list(jax.devices() if devices is None else devices)
        self.check_devices(len(available))
        return make_mesh(self.pipe, self.expert, available)


MeshSource = MeshConfig | Mapping[str, Any] | str | Path


def load_mesh(source: MeshSource) -> MeshConfig:
    """The mesh given as "PxE", as a YAML file's path, inline as a mapping, or as an object, which is returned.

    Raises:
      ConfigError: `source` is none of these, the file cannot be read, or its values are wrong: all in one message.
    """
    if isinstance(source, MeshConfig):
        return source
    if isinstance(source, Mapping):
        return MeshConfig.from_dict(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"mesh is {source!r:.80}; expected {_SHAPE}, a YAML file's path, a mapping or a MeshConfig")
    text = str(source).strip()
    if axes := re.fullmatch(r"(-?\d+)\s*[x×]\s*(-?\d+)", text, re.ASCII | re.IGNORECASE):
        return MeshConfig(int(axes[1]), int(axes[2]))
    path = Path(source)
    if path.suffix not in (".yaml", ".yml") and not (text and path.is_file()):
        raise ConfigError(f"mesh {text!r}: expected {_SHAPE}, or a YAML file with pipe, expert and maybe stages")
    return MeshConfig.from_dict(_read(path), str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a mesh file, or {_SHAPE}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())}); mend it") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {values!r:.60}; expected the keys pipe, expert and maybe stages")
    return values


def _stages(value: Any) -> Any:
    """Layer counts as text; what is neither stays and is refused."""
    counts = value if isinstance(value, list) and value else [value]
    return ",".join(map(str, counts)) if all(_is_int(n) for n in counts) else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unknown(key: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(key), known, 1)
    return f"unknown key {key!r}; expected {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")


def _faults(values: Mapping[str, Any]) -> Iterator[str]:
    for axis in ("pipe", "expert"):
        value = values.get(axis, 1)
        if not _is_int(value) or value < 1:
            yield f"{axis} is {value!r}; expected an integer of at least 1"
    stages = values.get("stages")
    if stages is not None and not isinstance(stages, str):
        yield f"stages is {stages!r:.60}; expected layer ranges such as 0-20,21-42 or layer counts such as 21,22"
