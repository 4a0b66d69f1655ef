"""Batches in shards: what is read, what is written, and what a run that was interrupted finds. Without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.serving.batch import write_error, write_response
from headrace.serving.ray import shards as sharding
from headrace.serving.ray.files import Source
from headrace.serving.ray.replica import encode_lines, read_items_back
from headrace.serving.ray.shards import Manifest, Plan, StoredIds, read_shards


def line(custom_id: str, **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": {"prompt": "go", **body}})


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(text + "\n" for text in lines))
    return path


def plan_of(source: Source, size: int = 2, output_format: str = "jsonl") -> Plan:
    return Plan(
        input=[(str(name), int(num_bytes)) for name, num_bytes in source.describe()], num_lines=source.count(),
        shard_size=size, output_format=output_format
    )


def ids(shards) -> list[list[str | None]]:
    return [[item.custom_id for item in shard.items] for shard in shards]


def test_a_folder_is_one_input(tmp_path: Path):
    write_lines(tmp_path / "b.jsonl", line("c"), "", line("d"), line("e"))
    write_lines(tmp_path / "a.jsonl", line("a"), line("b"))
    (tmp_path / "notes.txt").write_text("not read")
    source = Source.find(tmp_path)
    assert source.count() == 5
    shards = list(read_shards(source, 2, set()))
    assert ids(shards) == [["a", "b"], ["c", "d"], ["e"]]
    assert [item.number for shard in shards for item in shard.items] == [1, 2, 3, 5, 6]
    assert ids(read_shards(source, 2, {0, 2})) == [["c", "d"]]


def test_an_id_of_a_completed_shard_is_taken(tmp_path: Path):
    source = Source.find(write_lines(tmp_path / "in.jsonl", line("a"), line("b"), line("a"), "nonsense"))
    (shard,) = read_shards(source, 2, {0})
    assert [item.error is not None for item in shard.items] == [True, True]
    assert "earlier line" in shard.items[0].error.message
    assert shard.number == 1


def test_long_lines_end_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharding, "SHARD_BYTES", 200)
    lines = [line(str(i), user="x" * 100) for i in range(4)]
    source = Source.find(write_lines(tmp_path / "in.jsonl", *lines))
    assert ids(read_shards(source, 100, set())) == [["0", "1"], ["2", "3"]]


def test_stored_ids_are_a_set():
    stored = StoredIds()
    for custom_id in ("a", "b", "a", "ä'; DROP TABLE ids", "\ud800"[:0]):
        stored.add(custom_id)
    assert "a" in stored and "ä'; DROP TABLE ids" in stored and "c" not in stored
    stored.close()


def test_lines_travel_to_a_replica(tmp_path: Path):
    source = Source.find(write_lines(tmp_path / "in.jsonl", line("a", n=2), "nonsense", line("b")))
    (shard,) = read_shards(source, 10, set())
    back = read_items_back(encode_lines(shard.items))
    assert [(item.number, item.custom_id, item.line.body) for item in back] == [
        (1, "a", {"prompt": "go", "n": 2}), (3, "b", {"prompt": "go"})
    ]


def record_of(item) -> bytes:
    return write_error(item) if item.line is None else write_response(item, 200, "r", b'{"usage": {"total": 1}}')


def save(manifest: Manifest, shard) -> None:
    manifest.save(shard.number, b"".join(map(record_of, shard.items)), sum(i.line is None for i in shard.items))


def test_an_interrupted_run_goes_on(tmp_path: Path):
    source = Source.find(write_lines(tmp_path / "in.jsonl", *map(line, "abcde")))
    folder = tmp_path / "out"
    manifest = Manifest(folder, plan_of(source))
    shards = list(read_shards(source, 2, set()))
    save(manifest, shards[0])
    save(manifest, shards[1])
    with pytest.raises(ConfigError, match="another run"):
        Manifest(folder, plan_of(source))
    manifest.close()
    # killed while writing the manifest, and one part was lost
    with (folder / "manifest.jsonl").open("ab") as file:
        file.write(b'{"shard": 2, "fi')
    (folder / "part-000001.jsonl").unlink()
    again = Manifest(folder, plan_of(source, size=4))
    assert again.plan.shard_size == 2, "the size with which the run began"
    assert set(again.entries) == {0}
    for shard in read_shards(source, again.plan.shard_size, set(again.entries)):
        save(again, shard)
    again.close()
    found = [json.loads(text)["custom_id"] for part in sorted(folder.glob("part-*")) for text in part.open()]
    assert found == list("abcde")
    assert {entry.num_records for entry in Manifest(folder, plan_of(source)).entries.values()} == {1, 2}


def test_a_folder_of_another_input_is_left_alone(tmp_path: Path):
    first = Source.find(write_lines(tmp_path / "in.jsonl", line("a")))
    Manifest(tmp_path / "out", plan_of(first)).close()
    other = Source.find(write_lines(tmp_path / "other.jsonl", line("a")))
    with pytest.raises(ConfigError, match="another input"):
        Manifest(tmp_path / "out", plan_of(other))
    for name, text in (("manifest.jsonl", "something else\n"), ("part-000000.jsonl", "{}\n")):
        folder = tmp_path / f"with-{name}"
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(ConfigError, match="choose another"):
            Manifest(folder, plan_of(first))
        assert (folder / name).read_text() == text


def test_inputs_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read"):
        Source.find(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="has no files"):
        Source.find(tmp_path)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.parquet").touch()
    with pytest.raises(ConfigError, match="several formats"):
        Source.find(tmp_path)


def test_parquet_in_and_out(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    bodies = [{"prompt": "go", "max_tokens": 2}, {"prompt": "stay", "max_tokens": None}, {"prompt": None}]
    columns = {"custom_id": ["a", "b", None], "url": ["/v1/completions"] * 3, "body": bodies, "other": [1, 2, 3]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "structs.parquet")
    source = Source.find(tmp_path / "structs.parquet")
    assert source.count() == 3
    (shard,) = read_shards(source, 8, set())
    assert [item.line and item.line.body for item in shard.items] == [bodies[0], {"prompt": "stay"}, None]
    texts = {"custom_id": ["a", "b"], "url": ["/v1/completions"] * 2, "body": ['{"prompt": "go"}', "nonsense"]}
    parquet.write_table(pyarrow.table(texts), tmp_path / "texts.parquet")
    (shard,) = read_shards(Source.find(tmp_path / "texts.parquet"), 8, set())
    assert shard.items[0].line.body == {"prompt": "go"} and shard.items[1].error is not None
    manifest = Manifest(tmp_path / "out", plan_of(source, output_format="parquet"))
    save(manifest, shard)
    rows = parquet.read_table(tmp_path / "out" / "part-000000.parquet").to_pylist()
    assert rows[0]["custom_id"] == "a" and json.loads(rows[0]["response"]["body"]) == {"usage": {"total": 1}}
    assert rows[0]["response"]["status_code"] == 200 and rows[0]["error"] is None
    assert rows[1]["response"] is None and json.loads(rows[1]["error"])["line"] == 2
    parquet.write_table(pyarrow.table({"prompt": ["go"]}), tmp_path / "prompts.parquet")
    with pytest.raises(ConfigError, match="lacks the columns body, custom_id, url"):
        Source.find(tmp_path / "prompts.parquet").count()
    (tmp_path / "broken.parquet").write_text("no table")
    with pytest.raises(ConfigError, match="no Parquet file"):
        Source.find(tmp_path / "broken.parquet").count()
