"""Meshes as users write them: "PxE", YAML files, mappings; every fault named."""

from pathlib import Path

import jax
import pytest

from dspark_jax.errors import ConfigError
from dspark_jax.parallel.mesh_config import MeshConfig, load_mesh

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("source", "mesh"),
    [
        ("2x4", MeshConfig(2, 4)),
        (" 1X1 ", MeshConfig()),
        ("4×2", MeshConfig(4, 2)),
        ({"pipe": 2}, MeshConfig(2, 1)),
        ({"expert": 4, "stages": None}, MeshConfig(1, 4)),
        ({"pipe": 2, "stages": [21, 22]}, MeshConfig(2, 1, "21,22")),
        ({"stages": 43}, MeshConfig(1, 1, "43")),
        (MeshConfig(3, 2), MeshConfig(3, 2)),
    ],
)
def test_sources(source, mesh):
    assert load_mesh(source) == mesh


def test_files(tmp_path):
    path = tmp_path / "mesh.yaml"
    path.write_text("pipe: 2\nexpert: 1\nstages: 0-20,21-42\n")
    assert load_mesh(path) == load_mesh(str(path)) == MeshConfig(2, 1, "0-20,21-42")
    other = tmp_path / "mesh"  # any file will do, whatever its name
    other.write_text("stages: 21,22\npipe: 2\n")
    assert load_mesh(other) == MeshConfig(2, 1, "21,22")


@pytest.mark.parametrize("name", ["1x1", "2x1", "1x4", "2x2", "2x4", "4x2"])
def test_presets(name):
    mesh = load_mesh(ROOT / "configs" / "meshes" / f"{name}.yaml")
    assert str(mesh) == name and mesh.stages is None
    devices = jax.devices()[: mesh.devices]
    made = mesh.make(devices)
    assert dict(made.shape) == {"pipe": mesh.pipe, "expert": mesh.expert}
    assert list(made.devices.flat) == devices


def test_there_are_no_other_presets():
    assert len(list((ROOT / "configs" / "meshes").iterdir())) == 6


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("2y4", ["mesh '2y4': expected pipe ranks x expert ranks, as in 2x4, or a YAML file"]),
        ("2", ["mesh '2': expected"]),
        ("2x", ["mesh '2x': expected"]),
        ("", ["mesh '': expected"]),
        ("2x2x2", ["mesh '2x2x2': expected"]),
        ("0x-1", ["mesh: 2 faults", "pipe is 0; expected an integer of at least 1", "expert is -1; expected"]),
        ("absent.yaml", ["absent.yaml: cannot be read (No such file or directory)"]),
        (
            {"pipes": 2, "data": 1, "expert": 0, "pipe": "2", "stages": [1, "a"]},
            [
                "mesh: 5 faults",
                "unknown key 'pipes'; expected pipe, expert, stages; did you mean 'pipe'?",
                "unknown key 'data'; expected pipe, expert, stages",
                "pipe is '2'; expected an integer",
                "expert is 0; expected an integer of at least 1",
                "stages is [1, 'a']; expected layer ranges such as 0-20,21-42 or layer counts such as 21,22",
            ],
        ),
        ({"pipe": True, "expert": 1.0, "stages": []}, ["pipe is True", "expert is 1.0", "stages is []"]),
    ],
)
def test_faults_are_named(source, messages):
    with pytest.raises(ConfigError) as error:
        load_mesh(source)
    assert all(message in str(error.value) for message in messages), error.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pipe: 2\nexperts: 4\n",
            "mesh.yaml: unknown key 'experts'; expected pipe, expert, stages; did you mean 'expert'?",
        ),
        ("pipe: 0\n", "mesh.yaml: pipe is 0; expected an integer of at least 1"),
        ("2x4\n", "mesh.yaml: holds '2x4'; expected the keys pipe, expert and maybe stages"),
        ("", "mesh.yaml: holds None"),
        ("pipe: [\n", "mesh.yaml: not valid YAML"),
        ("pipe: \x00\n", "mesh.yaml: not valid YAML"),
    ],
)
def test_faults_of_files_name_the_file(tmp_path, text, message):
    path = tmp_path / "mesh.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_mesh(path)
    assert message in str(error.value) and str(error.value).startswith(str(tmp_path))


def test_a_folder_or_binary_file_is_no_mesh(tmp_path):
    folder = tmp_path / "mesh.yml"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_mesh(folder)
    binary = tmp_path / "mesh.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_mesh(binary)


def test_device_counts():
    MeshConfig(2, 4).check_devices(8)
    with pytest.raises(ConfigError, match=r"mesh 2x4 needs 8 devices, but there are 4; .* --emulate-devices 8"):
        MeshConfig(2, 4).check_devices(4)
    with pytest.raises(ConfigError, match="needs 2 devices, but there is 1;"):
        MeshConfig(2, 1).check_devices(1)
    with pytest.raises(ConfigError, match=r"mesh 2x2 takes 4 of 8 devices; choose a mesh of 8 \(pipe x expert\)"):
        MeshConfig(2, 2).make()
    with pytest.raises(ConfigError, match="needs 4 devices, but there are 3"):
        MeshConfig(4, 1).make(jax.devices()[:3])
    assert MeshConfig(4, 2).make().size == 8
