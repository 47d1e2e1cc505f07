"""Statistics files: written and read in TensorRT-LLM's layout, draft layers that are absent, windows, damaged folders."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dspark_jax.eplb import StatisticsError, StatisticsRecorder, read_statistics


def write(folder, tensors, rank=0, experts=3, top_k=2):
    folder.mkdir(exist_ok=True)
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": experts, "num_experts_per_token": top_k}))
    save_file({k: np.array(v, np.int32) for k, v in tensors.items()}, folder / f"rank{rank}.safetensors")


def test_files_are_as_tensorrt_writes_them(tmp_path):
    folder = tmp_path / "new" / "folder"
    for rank in (0, 1):
        recorder = StatisticsRecorder(3, 2, 100, 102)
        for iteration in range(99, 104):
            counts = np.array([[iteration, 0, 1], [0, rank, 2]], np.int32)
            recorder.add(iteration, counts, layers=[3, 61])
        recorder.add(100, np.array([[1, 1, 1]], np.int32), layers=[3])
        recorder.write(folder, rank)
    assert json.loads((folder / "meta_info.json").read_text()) == {"num_experts": 3, "num_experts_per_token": 2}
    tensors = load_file(folder / "rank1.safetensors")
    assert {k: v.tolist() for k, v in tensors.items()} == {
        "100_3": [101, 1, 2], "100_61": [0, 1, 2], "101_3": [101, 0, 1], "101_61": [0, 1, 2],
    }  # fmt: skip
    assert all(v.dtype == np.int32 for v in tensors.values())
    assert sorted(p.name for p in folder.iterdir()) == ["meta_info.json", "rank0.safetensors", "rank1.safetensors"]


def test_ranks_are_summed_and_iterations_added_up(tmp_path):
    write(tmp_path, {"7_0": [1, 2, 3], "8_0": [1, 0, 0], "7_1": [0, 0, 5], "8_1": [1, 1, 1]})
    write(tmp_path, {"7_0": [10, 0, 0], "8_0": [0, 10, 0], "8_1": [2, 2, 2]}, rank=1)
    found = read_statistics(tmp_path)
    assert (found.num_experts, found.top_k, found.ranks) == (3, 2, 2)
    assert found.iterations == [7, 8] and found.layers == [0, 1]
    assert found.load().tolist() == [[12, 12, 3], [3, 3, 8]]
    assert found.window(8).load().tolist() == [[1, 10, 0], [3, 3, 3]]
    assert found.window(stop=8).load().tolist() == [[11, 2, 3], [0, 0, 5]]
    assert found.window(7, 9).load().tolist() == found.load().tolist()
    with pytest.raises(StatisticsError, match="no iteration from 9 on was recorded; recorded are 7 … 8"):
        found.window(9)
    with pytest.raises(StatisticsError, match="no iteration from 2 on and before 5 was recorded"):
        found.window(2, 5)


def test_draft_layers_may_be_absent_in_some_iterations(tmp_path):
    write(tmp_path, {"0_0": [1, 1, 1], "1_0": [1, 1, 1], "2_0": [1, 1, 1], "1_1": [4, 0, 0], "other": [9]})
    found = read_statistics(tmp_path)
    assert found.layers == [0, 1] and found.load().tolist() == [[3, 3, 3], [4, 0, 0]]
    assert found.by_iteration(1).tolist() == [[4, 0, 0]] and found.by_iteration(0).shape == (3, 3)


counts = st.lists(st.lists(st.integers(0, 2**20), min_size=4, max_size=4), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.integers(0, 6), counts), min_size=1, max_size=6))
def test_what_was_recorded_is_read_back(tmp_path_factory, calls):
    recorder, expected = StatisticsRecorder(4, 2, 0, 5), {}
    for iteration, rows in calls:
        recorder.add(iteration, np.array(rows, np.int32))
        for layer, row in enumerate(rows if iteration < 5 else []):
            expected[iteration, layer] = expected.get((iteration, layer), 0) + np.array(row)
    folder = tmp_path_factory.mktemp("statistics")
    if not expected:
        with pytest.raises(StatisticsError, match=r"no iteration of the window \[0, 5\) was counted"):
            recorder.write(folder)
        return
    recorder.write(folder)
    found = read_statistics(folder).counts
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(found[key], row)


def test_a_recorder_knows_its_window_and_its_shapes(tmp_path):
    recorder = StatisticsRecorder(3, 2, 2, 4)
    assert [recorder.finished(i) for i in range(6)] == [False, False, False, True, True, True]
    for wrong in (np.zeros((2, 4), np.int32), np.zeros(3, np.int32), np.zeros((2, 3), np.float32)):
        with pytest.raises(StatisticsError, match=r"expected integers \[layers, 3\]"):
            recorder.add(2, wrong)
    with pytest.raises(StatisticsError, match=r"window of iterations is \[4, 4\)"):
        StatisticsRecorder(3, 2, 4, 4)
    for _ in range(2):
        recorder.add(2, np.full((1, 3), 2**31 - 1, np.int32))
    with pytest.raises(StatisticsError, match="exceeds the int32 of the file"):
        recorder.write(tmp_path)


def test_damaged_folders(tmp_path):
    def fails(*parts):
        with pytest.raises(StatisticsError) as error:
            read_statistics(folder)
        assert str(folder) in str(error.value)
        for part in parts:
            assert part in str(error.value)

    folder = tmp_path / "absent"
    fails("no such folder")
    folder = tmp_path
    fails("meta_info.json: cannot be read (No such file or directory)")
    (folder / "meta_info.json").write_text("{")
    fails("not valid JSON")
    (folder / "meta_info.json").write_text('{"num_experts": 0}')
    fails("num_experts is 0; expected a positive integer", "num_experts_per_token is None")
    (folder / "meta_info.json").write_text('{"num_experts": 3, "num_experts_per_token": 2}')
    fails("has no rank*.safetensors")
    save_file({"x": np.zeros(3, np.int32)}, folder / "rank0.safetensors")
    fails("holds no counts")
    save_file({"0_0": np.zeros(4, np.int32), "0_1": np.array([1, -2, 0], np.int32)}, folder / "rank3.safetensors")
    (folder / "rank0.safetensors").write_bytes(b"short")
    fails(
        "4 faults",
        "lacks the files of ranks [1, 2] (there are ranks up to 3)",
        "rank0.safetensors cannot be read",
        "rank3.safetensors: 0_0 is int32 [4]; expected integers [3], num_experts of meta_info.json",
        "rank3.safetensors: 0_1 holds the count -2; expected none below 0",
    )
