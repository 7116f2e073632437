"""History over REST: lists, labels, details, aggregates and exports; the stores' tests say more."""

from __future__ import annotations

import csv
import io
import json
import statistics
import tracemalloc
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from paceline.wire import RankDevice, RoundBatch, StepBatch
from paceline_backend.api.export import written
from paceline_backend.store import Store, runs, schema, telemetry
from paceline_backend.store.details.rows import TABLES, Wanted, parts
from paceline_backend.store.history import days
from support.pages import keep_forecast
from support.records import a_round, add_run, adopted, hello, pack_indices, put_switch, record
from support.waiting import until
from support.web import ANY

V1 = "/api/v1"


def get(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(f"{V1}{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, path: str, **query: Any) -> str:
    answer = client.get(f"{V1}{path}", params=query)
    assert answer.status_code == 422, answer.text
    return str(answer.json()["detail"])


T4 = RankDevice("cuda", "Tesla T4", 4, 1 << 34, threads=2, emulated=True)
XEON = RankDevice("cpu", "Xeon", 8, 1 << 36, flops=1e11)
_plain = msgspec.to_builtins


def train(store: Store, run: str = "r", steps: int = 8) -> int:
    """Ranks 0 and 1; plans of two steps, of which each assigns samples 0 to 3."""
    key = add_run(store, run, node="n1")
    rows = [record(step, rank) for step in range(steps) for rank in (0, 1)]
    introduced = hello(
        limits=[8, 16],
        profiles=[[(4, 0.1)], []],
        placement=["n1", "n2"],
        device="GPU 7",
        devices=[T4, XEON],
    )
    plans = [(run, adopted(seq, 2 * seq)) for seq in range(steps // 2)]
    rounds = [a_round(seq) for seq in range(4)]
    telemetry.write(store, [(run, introduced), (run, StepBatch(rows)), *plans])
    telemetry.write(store, [(run, RoundBatch(rounds))])
    days.sum_up(store, key)
    return key


def test_runs_by_what_people_ask_for(client: httpx.Client, store: Store) -> None:
    train(store)
    other = add_run(store, "other", policy="paceline", name="night")
    with store.write() as connection:
        row = {"run": other, "version": 0, "policy": "paceline", "requested_by": "me"}
        row |= {"parameters": {"mode": "free", "window": 32}, "requested_at": 1.0}
        put_switch(connection, row)

    def ids(**query: Any) -> list[str]:
        return [run["id"] for run in get(client, "/runs", **query)["items"]]

    assert ids() == ["other", "r"]
    assert ids(sort="-waste") == ["r", "other"], "what is not known comes last"
    assert ids(parameter=["window=32", "mode=free"]) == ["other"]
    assert ids(parameter="window=33") == []
    assert ids(device="gpu") == ids(node="n1") == ids(waste_min=0.2) == ids(text="gpu 7") == ["r"]
    assert ids(used="paceline") == ids(text="nigh") == ["other"]
    assert ids(se_max=0.1) == []
    run = get(client, "/runs", node="n1")["items"][0]
    assert (run["figures"]["steps"], run["tags"], run["note"]) == (8, [], "")
    assert run["figures"]["waste"] == pytest.approx(0.25)
    for query, field in (
        ({"sort": "color"}, "sort"),
        ({"parameter": "window"}, "parameter"),
        ({"parameter": "a b=1"}, "parameter"),
        ({"waste_min": "nan"}, "waste_min"),
        ({"since": "1e13"}, "since"),
        ({"sort": "-se", "cursor": "MTI"}, "cursor"),
    ):
        assert field in refused(client, "/runs", **query)


def test_tags_and_notes_over_rest(client: httpx.Client, store: Store) -> None:
    add_run(store, "r", state="finished")
    tags = f"{V1}/runs/r/tags"
    assert client.put(f"{tags}/nightly", params={"by": "me"}).status_code == 200
    assert client.put(f"{tags}/nightly").json()["tags"] == ["nightly"]
    assert client.put(f"{tags}/two words").status_code == 422
    assert get(client, "/tags") == [{"tag": "nightly", "runs": 1}]
    first = client.get(f"{V1}/runs/r")
    assert first.json()["revision"] == 0, "tags come and go by themselves"
    body = {"note": "the new data\nis cleaner", "why": "seen"}
    assert client.put(f"{V1}/runs/r/note", json=body).status_code == 428
    written_note = client.put(
        f"{V1}/runs/r/note", json=body, headers={"If-Match": first.headers["etag"]}
    )
    assert written_note.json()["note"] == body["note"]
    late = client.put(f"{V1}/runs/r/note", json=body, headers={"If-Match": first.headers["etag"]})
    assert late.status_code == 412
    assert client.delete(f"{tags}/nightly").json()["tags"] == []
    assert client.delete(f"{tags}/nightly").status_code == 200
    actions = [change["action"] for change in get(client, "/runs/r/audit")["items"]]
    assert actions == ["run.untag", "run.note", "run.tag"]
    assert client.put(f"{V1}/runs/none/tags/a").status_code == 404
    missing = client.put(f"{V1}/runs/none/note", json=body, headers=ANY)
    assert missing.status_code == 404


def test_a_note_refuses_no_change_of_the_training(client: httpx.Client, store: Store) -> None:
    add_run(store, "r", state="running")
    seen = {"If-Match": client.get(f"{V1}/runs/r").headers["etag"]}
    body = {"note": "hot in here", "operator": "ada"}
    note = client.put(f"{V1}/runs/r/note", json=body, headers=seen)
    assert note.is_success
    [row] = get(client, "/runs/r/audit")["items"]
    assert row["details"]["operator"] == "ada"
    auto = {"mode": "recommend"}
    assert client.put(f"{V1}/runs/r/auto", json=auto, headers=seen).is_success
    late = client.put(f"{V1}/runs/r/auto", json=auto, headers={"If-Match": note.headers["etag"]})
    assert late.status_code == 412, "somebody has changed auto since the note"
    client.put(f"{V1}/runs/r/note", json=body, headers=ANY)
    client.put(f"{V1}/runs/r/tags/nightly")
    late = client.put(f"{V1}/runs/r/auto", json=auto, headers={"If-Match": note.headers["etag"]})
    assert late.json()["action"] == "run.auto", "not a label"
    assert client.put(f"{V1}/runs/r/auto", json=auto, headers=seen).status_code == 412
    nonsense = {"If-Match": '"-"'}
    assert client.put(f"{V1}/runs/r/auto", json=auto, headers=nonsense).status_code == 412


def test_every_stored_column_of_workers_steps(client: httpx.Client, store: Store) -> None:
    key = train(store)
    names = [
        "data_s",
        "sync_s",
        "step_s",
        "loss",
        "memory_bytes",
        "squares",
        "longest",
        "recompiles",
    ]
    names += ["ended_at", "epoch", "segment", "attempt"]
    columns = get(client, "/runs/r/worker-steps", columns=names, ranks="1")
    c = schema.worker_steps.c
    stored = {column.name for column in c} - {"run", "step", "rank", "seq"}
    assert stored <= {*names, "compute_s", "ett_s", "samples", "load"}
    with store.read() as connection:
        for name in names:
            query = sa.select(c[name]).where(c.run == key, c.rank == 1).order_by(c.step)
            assert columns[name] == [list(connection.scalars(query))], name
    plain = get(client, "/runs/r/worker-steps")
    assert not set(names) & set(plain)
    halves = get(client, "/runs/r/worker-steps", columns="loss", points=3)
    assert halves["loss"][0] == [2.0] * len(halves["step"])
    assert "columns" in refused(client, "/runs/r/worker-steps", columns="env")


def test_wall_clock_ranges(client: httpx.Client, store: Store) -> None:
    train(store)  # step s ends at 1,000 + s
    assert get(client, "/runs/r/steps", since=1002, until=1005)["step"] == [2, 3, 4]
    assert get(client, "/runs/r/worker-steps", since=1006)["step"] == [6, 7]
    assert get(client, "/runs/r/steps", since=1002, **{"from": 4}, until=1006)["step"] == [4, 5]
    assert get(client, "/runs/r/steps", since=2000)["step"] == []


def test_who_got_which_samples(client: httpx.Client, store: Store) -> None:
    train(store)
    answer = get(client, "/runs/r/samples", to=1)
    assert answer["next_from"] is None
    got = [(item["step"], item["rank"], item["samples"]) for item in answer["items"]]
    assert got == [(0, 0, [0, 1]), (0, 1, [2]), (1, 0, [3]), (1, 1, [])]
    of_sample = get(client, "/runs/r/samples", sample=3)["items"]
    assert [(item["step"], item["rank"]) for item in of_sample] == [(s, 0) for s in (1, 3, 5, 7)]
    seen, first = [], 0
    while first is not None:
        part = get(client, "/runs/r/samples", limit=3, ranks="1", **{"from": first})
        seen += [item["step"] for item in part["items"]]
        first = part["next_from"]
    assert seen == list(range(8))


def test_what_each_worker_did_in_an_epoch(client: httpx.Client, store: Store) -> None:
    key = train(store, steps=8)  # two epochs of four steps
    first, second = get(client, "/runs/r/epochs/0/workers")
    assert (first["rank"], first["steps"], first["samples"], first["load"]) == (0, 4, 16, 160.0)
    assert first["share"] == pytest.approx(160 / 324)
    assert first["compute_s"] == pytest.approx(0.4)
    assert second["ett_error"] == pytest.approx(0.5), "0.1 s were expected of steps of 0.2 s"
    assert (first["slowest_share"], second["slowest_share"]) == (0.0, 1.0)
    assert first["came"] is None, "there is no epoch before"
    again, _ = get(client, "/runs/r/epochs/1/workers")
    assert (again["came"], again["went"]) == (0, 0)
    assert get(client, "/runs/r/epochs/7/workers") == []
    with store.read() as connection:
        c = schema.worker_steps.c
        rows = connection.execute(
            sa.select(c.sync_s, schema.steps.c.sync_min)
            .join(schema.steps, (schema.steps.c.run == c.run) & (schema.steps.c.step == c.step))
            .where(c.run == key, c.rank == 0, c.step < 4)
        ).all()
    assert first["wait_s"] == pytest.approx(sum(sync - least for sync, least in rows))


def test_what_the_shuffler_moved_between_epochs(client: httpx.Client, store: Store) -> None:
    """In epoch 0 ranks have samples {0, 1} and {2}; in epoch 1 they have {2} and {0, 3}."""
    add_run(store, "m", state="running")
    telemetry.write(store, [("m", hello())])
    sizes = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}  # of `hello`
    owned = {0: [[0, 1], [2]], 1: [[2], [0, 3]]}
    for epoch, ranks in owned.items():
        counts, indices = pack_indices([[np.array(samples) for samples in ranks]])
        segment = adopted(epoch, epoch, counts=counts, indices=indices, epoch=epoch)
        records = [
            record(
                epoch,
                rank,
                epoch=epoch,
                samples=len(samples),
                load=sum(sizes[sample] for sample in samples),
                squares=sum(sizes[sample] ** 2 for sample in samples),
            )
            for rank, samples in enumerate(ranks)
        ]
        telemetry.write(store, [("m", segment), ("m", StepBatch(records))])
    left, right = get(client, "/runs/m/epochs/1/workers")
    assert (left["came"], left["came_load"], left["went"], left["went_load"]) == (1, 3.0, 1, 1.0)
    assert (right["came"], right["came_load"]) == (1, 1.0)
    assert (right["went"], right["went_load"]) == (1, 3.0)
    assert left["dif"] is None, "one sample has no deviation"
    assert right["dif"] == pytest.approx(statistics.stdev([1.0, 4.0]))


def test_epochs_devices_forecasts_and_verdicts(client: httpx.Client, store: Store) -> None:
    train(store, steps=40)
    first, *_ = epochs = get(client, "/runs/r/epochs")
    assert [epoch["epoch"] for epoch in epochs] == list(range(10))
    assert (first["first_step"], first["last_step"], first["steps"]) == (0, 3, 4)
    assert (first["samples"], first["loss"]) == (32, 2.0)
    assert len(get(client, "/runs/r/epochs", limit=2)) == 2
    devices = get(client, "/runs/r/devices")
    assert (devices["device"], devices["attempt"]) == ("GPU 7", 0)
    assert devices["ranks"] == [
        {"rank": 0, "node": "n1", "limit": 8, "profile": [[4, 0.1]], "device": _plain(T4)},
        {"rank": 1, "node": "n2", "limit": 16, "profile": [], "device": _plain(XEON)},
    ]
    assert [worker["device"] for worker in get(client, "/runs/r/workers")] == [
        _plain(T4),
        _plain(XEON),
    ]
    assert get(client, "/runs/r/forecasts") == []
    keep_forecast(store, "r")
    [forecast] = get(client, "/runs/r/forecasts", decided=True)
    assert forecast["decision"]["decided"] == "recommend"
    assert [preset["policy"] for preset in forecast["forecasts"]] == ["chronica", "bsp", "boa"]
    verdicts = get(client, "/runs/r/verdicts", parts=4)["items"]
    assert [(verdict["from"], verdict["to"]) for verdict in verdicts] == [
        *((0, 9), (10, 19)),
        *((20, 29), (30, 39)),
    ]
    waste = [verdict["waste"] for verdict in verdicts]
    assert waste == pytest.approx([0.05] * 4, abs=0.002)  # 0.05 s of steps that end 1 s apart
    add_run(store, "empty")
    assert get(client, "/runs/empty/verdicts") == {"items": []}
    assert get(client, "/runs/empty/devices")["ranks"] == []


def test_aggregates(client: httpx.Client, store: Store) -> None:
    train(store)
    [row] = get(client, "/history", by=["day", "policy"], node="n1")
    assert (row["day"], row["policy"], row["steps"]) == ("1970-01-01", "bsp", 8)
    assert "node" not in row
    assert get(client, "/history", from_day=90_000) == []
    assert "by" in refused(client, "/history", by="colour")


def test_filters_of_runs_hold_in_sums_too(client: httpx.Client, store: Store) -> None:
    """Sums read the same tables as the filters, for which rows of their own count."""
    switched(store, "r", {0: ("bsp", 0), 1: ("boa", 130)})
    switched(store, "alone", {0: ("bsp", 0), 1: ("sata", 130)})
    queries: list[tuple[dict[str, str], int]] = [
        ({"used": "bsp"}, 2),
        ({"used": "boa"}, 1),
        ({"policy": "sata"}, 1),
        ({"parameter": "window=32"}, 0),
        ({"tag": "speech"}, 0),
        ({"node": "n1"}, 0),
        ({"text": "alo"}, 1),
    ]
    for query, count in queries:
        rows = get(client, "/history", by=["day", "node"], **query)
        assert sum(row["steps"] for row in rows) == 300 * count, query
        assert len(get(client, "/runs", **query)["items"]) == count, query


def switched(store: Store, run: str, policies: dict[int, tuple[str, int | None]]) -> int:
    """A run of 300 steps; of each version its policy, and the first step that it planned."""
    key = add_run(store, run, policy=policies[max(policies)][0], version=max(policies))
    ends = [*[step for _, step in policies.values() if step is not None][1:], 300]
    plans = []
    with store.write() as connection:
        for version, (policy, step) in policies.items():
            row = {"run": key, "version": version, "policy": policy, "parameters": {}}
            row |= {"requested_at": 1.0, "requested_by": "test"}
            put_switch(connection, row)
            if step is not None:
                counts = [[4, 4]] * (ends.pop(0) - step)
                plans.append(
                    (run, adopted(len(plans), step, version, policy=policy, counts=counts))
                )
    rows = [record(step, rank) for step in range(300) for rank in (0, 1)]
    telemetry.write(store, [(run, hello()), *plans, (run, StepBatch(rows))])
    days.sum_up(store, key)
    return key


def by_policy(client: httpx.Client, **query: Any) -> dict[tuple[str, bool], int]:
    rows = get(client, "/history", by="policy", **query)
    return {(row["policy"], row["simulated"]): row["steps"] for row in rows}


def test_steps_belong_to_the_policy_that_planned_them(client: httpx.Client, store: Store) -> None:
    """Not to the one that was asked for last, which may never have planned any."""
    switched(store, "r", {0: ("bsp", 0), 1: ("lbb", 130), 2: ("paceline", 250), 3: ("boa", None)})
    switched(store, "alone", {0: ("bsp", 0), 1: ("sata", None)})
    expected = {("bsp", False): 430, ("lbb", False): 120, ("paceline", False): 50}
    assert by_policy(client) == expected
    [row] = get(client, "/history")
    assert (row["runs"], row["steps"]) == (2, 600)
    [lbb] = [row for row in get(client, "/history", by="policy") if row["policy"] == "lbb"]
    assert lbb["worker_hours"] == pytest.approx(2 * 120 * 0.3 / 3600)
    assert sum(row["steps"] for row in get(client, "/history", by=["day", "policy"])) == 600
    figures = {run["id"]: run["figures"]["steps"] for run in get(client, "/runs")["items"]}
    assert figures == {"r": 300, "alone": 300}


def test_steps_that_were_trained_again_belong_to_the_later_policy(
    client: httpx.Client, store: Store
) -> None:
    """The second attempt begins before the step with which the switch took effect."""
    key = switched(store, "r", {0: ("bsp", 0), 1: ("lbb", 200)})
    again = hello(attempt=1, step=150)
    plan = adopted(0, 150, 1, attempt=1, policy="lbb", counts=[[4, 4]] * 150)
    rows = [record(step, rank, 1, seq=step - 150) for step in range(150, 300) for rank in (0, 1)]
    telemetry.write(store, [("r", again), ("r", plan), ("r", StepBatch(rows))])
    days.sum_up(store, key)
    assert by_policy(client) == {("bsp", False): 150, ("lbb", False): 150}


def test_simulated_runs_have_rows_of_their_own(client: httpx.Client, store: Store) -> None:
    train(store)
    train(store, "virtual")
    with store.write() as connection:
        virtual = schema.runs.c.id == "virtual"
        connection.execute(sa.update(schema.runs).where(virtual).values(backend="simulated"))
    for by in ((), "day", "policy", ("day", "node"), "device"):
        rows = get(client, "/history", by=list(by) if isinstance(by, tuple) else by)
        assert {row["simulated"] for row in rows} == {False, True}
        assert all(row["runs"] == 1 and row["steps"] == 8 for row in rows)
    [row] = get(client, "/history", backend="simulated")
    assert row["simulated"]


ROWS = {"steps": 8, "worker-steps": 16, "rounds": 4, "segments": 4, "switches": 1}


@pytest.mark.parametrize("table", sorted(ROWS))
def test_exports_hold_the_same_rows_in_each_format(
    client: httpx.Client, store: Store, table: str
) -> None:
    key = train(store)

    def export(form: str, **query: Any) -> bytes:
        answer = client.get(f"{V1}/runs/r/export", params={"table": table, "format": form, **query})
        assert answer.status_code == 200, answer.text
        assert f'filename="r-{table}.{form}"' in answer.headers["content-disposition"]
        return answer.content

    lines = [json.loads(line) for line in export("ndjson").splitlines() if line]
    assert len(lines) == ROWS[table]
    of_csv = list(csv.DictReader(io.StringIO(export("csv").decode())))
    file = pq.read_table(io.BytesIO(export("parquet")))
    assert file.column_names == list(TABLES[table].kinds)
    lines = [{k: json.dumps(v) if isinstance(v, dict) else v for k, v in e.items()} for e in lines]
    assert file.to_pylist() == lines
    for line, texts in zip(lines, of_csv, strict=True):
        assert {k: "" if v is None else str(v) for k, v in line.items()} == texts
    if table in ("steps", "worker-steps"):
        some = export("csv", since=1002, until=1005, **{"from": 3}).decode().splitlines()
        assert len(some) - 1 == ROWS[table] // 8 * 2
    # Parts of any size make the same rows.
    chosen = TABLES[table]
    small = [row for part in parts(store, key, chosen, Wanted(), 3) for row in part]
    assert small == [row for part in parts(store, key, chosen, Wanted()) for row in part]


@pytest.mark.parametrize("form", ["csv", "ndjson", "parquet"])
def test_an_export_never_holds_more_than_some_parts(form: Any) -> None:
    """200 parts of 1,000 rows: all at once they would take 100 MB."""
    kinds = TABLES["worker-steps"].kinds
    row = tuple(1_234_567.25 if kind == "number" else 7 for kind in kinds.values())

    def many() -> Any:
        for _ in range(200):
            yield [row] * 1_000

    size = 0
    pieces = written(form, kinds, many())
    tracemalloc.start()
    for piece in pieces:
        size += len(piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000
    assert size > 10_000


def test_exports_that_cannot_be(client: httpx.Client, store: Store) -> None:
    add_run(store, "r")
    assert "table" in refused(client, "/runs/r/export", table="tokens")
    assert client.get(f"{V1}/runs/none/export").status_code == 404
    empty = client.get(f"{V1}/runs/r/export")
    assert empty.text.startswith("step,epoch,")
    assert runs.get(store, "r")["figures"] is None


def test_devices_are_those_of_the_latest_attempt(client: httpx.Client, store: Store) -> None:
    train(store)
    again = hello(attempt=1, step=8, devices=[XEON, T4])
    rows = [record(step, rank, attempt=1) for step in (8, 9) for rank in (0, 1)]
    telemetry.write(store, [("r", again), ("r", StepBatch(rows))])

    def devices() -> list[Any]:
        return [worker["device"] for worker in get(client, "/runs/r/workers")]

    # An answer that took long is given again for a while.
    until(lambda: [d["name"] for d in devices()] == ["Xeon", "Tesla T4"], "the new attempt")
    silent = hello(attempt=2, step=10)  # its ranks tell no devices
    telemetry.write(store, [("r", silent)])
    until(lambda: devices() == [None, None], "the last attempt")
