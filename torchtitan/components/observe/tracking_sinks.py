"""Trackers of experiments as destinations of a run's metrics: Weights & Biases, MLflow, Trackio."""

import hashlib
import importlib.util
import math
import os
import re
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torchtitan.components.observe.metric_sinks import Sink
from torchtitan.config.configurable import leaves
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_regular
from torchtitan.tools.redact import redacted


class Tracker(Sink):
    """A tracker, configured by its own environment variables. A resumed run continues the
    tracker's run, whose id is in a file of the folder `package`; points that the tracker already
    has are kept.

    Args:
        dump_folder: folder of the run.
        step: last completed step.
        run_config: the run's configuration; credentials are hidden.
    """

    package: ClassVar[str]

    option: ClassVar[str]
    """Option that selects it."""

    def __init__(self, dump_folder: Path, step: int, run_config: Mapping[str, object]):
        id_file = dump_folder / self.package / "run_id"
        id_file.parent.mkdir(exist_ok=True)
        known = read_regular(id_file).decode() if step > 0 and id_file.exists() else None
        id_file.write_text(self.open(dump_folder, known, redacted(run_config)))

    @abstractmethod
    def open(self, dump_folder: Path, run_id: str | None, config: Mapping[str, object]) -> str:
        """Continue the tracker's run with this id, or start a new one (None). Return its id. Raise
        `UserError` if the tracker does not start."""

    @classmethod
    def check_installed(cls) -> None:
        """Raise `UserError` if its package is not installed."""
        spec = importlib.util.find_spec(cls.package)
        # no origin: only a folder of that name, such as W&B's own output
        if spec is None or spec.origin is None:
            raise UserError(
                f"{cls.option} needs the package {cls.package}: pip install {cls.package}"
            )

    @classmethod
    def check_login(cls) -> None:
        """Raise `UserError` if its package does not know the user."""


_WITHOUT_LOGIN = "run `wandb login`, set WANDB_MODE=offline, or remove --metrics.enable_wandb"


class WandB(Tracker):
    """Weights & Biases (`WANDB_PROJECT`, `WANDB_NAME`, `WANDB_MODE`, ...)."""

    package, option = "wandb", "--metrics.enable_wandb"

    @classmethod
    def check_login(cls) -> None:
        import wandb

        # Its settings are also those of the file that `wandb offline` writes.
        mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
        # verify: a wrong key is left to the start, which needs the network anyway
        if mode in ("online", "run", "shared") and not wandb.login(prompt=False, verify=False):
            raise UserError(f"Weights & Biases does not start: not logged in; {_WITHOUT_LOGIN}")

    def open(self, dump_folder: Path, run_id: str | None, config: Mapping[str, object]) -> str:
        import wandb

        self._error = wandb.Error
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan"),
                dir=dump_folder,
                config=dict(config),
                id=run_id,
                resume="allow" if run_id else None,
            )
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases does not start: {error}; {_WITHOUT_LOGIN}"
            ) from error
        return str(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        try:
            self._run.log(dict(values), step=step)
        except self._error as error:
            raise OSError(f"Weights & Biases: {error}") from error

    def close(self) -> None:
        self._run.finish()


_MOST_PARAMETERS = 100
"""Parameters that MLflow takes at once."""

_LONGEST_PARAMETER = 6000
"""Characters of MLflow's values of parameters."""


def name_for_mlflow(name: str) -> str:
    """Return a name with `_` for characters and parts of paths that MLflow refuses. The digest of a
    name that changes keeps it apart from others, also in resumed runs."""
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    allowed = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if allowed == name:
        return name
    return f"{allowed}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class MLflow(Tracker):
    """MLflow (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`, ...). The configuration becomes its
    parameters."""

    package, option = "mlflow", "--metrics.enable_mlflow"

    def open(self, dump_folder: Path, run_id: str | None, config: Mapping[str, object]) -> str:
        import mlflow
        from mlflow.entities import Param

        self._error = mlflow.MlflowException
        try:
            self._client = mlflow.MlflowClient()
            if run_id is not None:
                self._client.update_run(run_id, status="RUNNING")
                self._id = run_id
                return run_id
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchtitan")
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(name)
            )
            run = self._client.create_run(
                experiment_id, run_name=os.environ.get("MLFLOW_RUN_NAME") or dump_folder.name
            )
            self._id = str(run.info.run_id)
            parameters = [
                Param(name_for_mlflow(key), str(value)[:_LONGEST_PARAMETER])
                for key, value in leaves(config).items()
            ]
            for start in range(0, len(parameters), _MOST_PARAMETERS):
                part = parameters[start : start + _MOST_PARAMETERS]
                self._client.log_batch(self._id, params=part)
        except (mlflow.MlflowException, ImportError) as error:
            raise UserError(
                f"MLflow does not start: {error}; set MLFLOW_TRACKING_URI to a server or a "
                "database, such as sqlite:///mlflow.db, or remove --metrics.enable_mlflow"
            ) from error
        return self._id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # Databases of MLflow store infinity as the largest double, a loss like any other.
        metrics = [
            Metric(name_for_mlflow(name), math.nan if math.isinf(value) else value, now, step)
            for name, value in values.items()
        ]
        try:
            self._client.log_batch(self._id, metrics=metrics)
        except self._error as error:
            raise OSError(f"MLflow: {error}") from error

    def close(self) -> None:
        try:
            self._client.set_terminated(self._id)
        except self._error as error:
            raise OSError(f"MLflow: {error}") from error


class Trackio(Tracker):
    """Trackio (`TRACKIO_PROJECT`, `TRACKIO_DIR`, `TRACKIO_SPACE_ID`, ...), on this machine unless
    told otherwise. Its runs are known by their names."""

    package, option = "trackio", "--metrics.enable_trackio"

    def open(self, dump_folder: Path, run_id: str | None, config: Mapping[str, object]) -> str:
        import trackio

        try:
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "torchtitan"),
                name=run_id or f"{dump_folder.name}-{time.time_ns():x}",
                config=dict(config),
                resume="must" if run_id else "never",
                embed=False,
            )
        except (ValueError, OSError) as error:
            raise UserError(
                f"Trackio does not start: {error}; check its variables, or remove "
                "--metrics.enable_trackio"
            ) from error
        return str(self._run.name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
