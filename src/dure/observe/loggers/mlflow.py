"""MLflow: a run that is found again by its tag; steps that it has are not logged again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dure.observe.loggers.backend import Row, Run
from dure.observe.loggers.identity import last_steps, run_id

TAG = "dure.run"
_AT_ONCE = 1000
_PARAMS_AT_ONCE = 100
"""The most metrics, and parameters, that one request may have."""


class MLflow:
    """Logs to MLFLOW_TRACKING_URI, or into a folder beside the other loggers."""

    def __init__(self, run: Run) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # A plain folder needs no database package; MLflow wants to be told that this is meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / "mlflow").absolute().as_uri()
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(uri)
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run.project)
        own = run_id(run.folder)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{own}'")
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(experiment, tags={TAG: own}, run_name=run.name).info.run_id
            params = [Param(name, str(value)[:500]) for name, value in run.config.items()]
            for start in range(0, len(params), _PARAMS_AT_ONCE):
                self._client.log_batch(self._run, params=params[start : start + _PARAMS_AT_ONCE])

    def logged(self) -> dict[str, int]:
        """As the server, or the folder, has it."""
        names = self._client.get_run(self._run).data.metrics
        history = ((name, self._client.get_metric_history(self._run, name)) for name in names)
        return last_steps((name, metric.step) for name, metrics in history for metric in metrics)

    def write(self, rows: Sequence[Row]) -> None:
        """In as few requests as there can be."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(row.at * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _AT_ONCE])

    def close(self) -> None:
        """The run is over, until it goes on."""
        self._client.set_terminated(self._run)
