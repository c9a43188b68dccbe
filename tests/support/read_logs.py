"""What other people's tools have recorded of a run, read with their own code: {name: [(run, step, value), …]}."""

import csv
import json
import sys
from pathlib import Path


def read_csv(folder):
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield row["name"], ("", int(row["step"]), float(row["value"]))


def read_jsonl(folder):
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name not in ("step", "time"):
                yield name, ("", row["step"], value)


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in found.Tags()["scalars"]:
        for event in found.Scalars(name):
            yield name, ("", event.step, event.value)


def read_mlflow(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient((folder / "mlflow").as_uri())
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            for name in run.data.metrics:
                for metric in client.get_metric_history(run.info.run_id, name):
                    yield name, (run.info.run_id, metric.step, metric.value)


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in records_in(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
            }
            for name, value in items.items():
                if not name.startswith("_"):
                    yield name, (path.stem, items["_step"], value)


def records_in(data, block=32768, head=7):
    """Of a LevelDB log, which W&B's files are, after as many bytes of its own as a record's head has."""
    at, whole = head, b""
    while at + head <= len(data):
        left = block - at % block
        if left < head:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + head : at + head + length]
        at += head + length
        if at > len(data):
            return  # half a record that a kill left
        if kind in (1, 4):  # whole, or the last part of one
            yield whole
            whole = b""


def read_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    for project in SQLiteStorage.get_projects():
        for run in SQLiteStorage.get_runs(project):
            for row in SQLiteStorage.get_logs(project, run):
                for name, value in row.items():
                    if name not in ("step", "timestamp"):
                        yield name, (run, row["step"], value)


if __name__ == "__main__":
    everything = {}
    for tool in sys.argv[2:]:
        found = everything.setdefault(tool, {})
        for key, point in globals()[f"read_{tool}"](Path(sys.argv[1])):
            found.setdefault(key, []).append(point)
    print(json.dumps(everything))
