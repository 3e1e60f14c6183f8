"""torchtitan's files in TOML, lines of its `config_registry.py`, and its command lines."""

import ast
import json
import math
from collections.abc import Mapping
from pathlib import Path

from torchtitan.config.configurable import fits
from torchtitan.config.migration.outcome import Migration, Rule, flat, missing, to, unneeded
from torchtitan.config.option_table import TABLE, known_configuration
from torchtitan.tools.errors import UserError, suggest

_SECTIONS = {
    "validation": "validator",
    "optimizers": "optimizer",
    "lr_schedulers": "lr_scheduler",
    "dataloaders": "dataloader",
    "activation_checkpointing": "activation_checkpoint",
    "debugging": "debug",
    "ac": "activation_checkpoint",
    "trainer": "training",
}
_EXPORTS = tuple(
    f"checkpoint.{name}"
    for name in (
        *("last_save_model_only", "model_weights_only"),
        *("last_save_model_weights_only", "last_save_in_hf"),
    )
)
"""Options of a last save without what resuming needs."""
_KEYS = {
    "activation_checkpoint.selective_ac_option": "activation_checkpoint.selective_option",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "job.dump_folder": "dump_folder",
    "training.compile": "compile.enable",
    "training.batch_size": "training.local_batch_size",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "parallelism.enable_loss_parallel": "parallelism.disable_loss_parallel",
}
"""Their key → our option with the same value."""


def migrate_torchtitan(migration: Migration) -> None:
    """Read torchtitan's own options, whose names ours mostly are."""
    _model(migration)
    _data(migration)
    _batch(migration)
    _saves(migration)
    options = _known_options(migration)
    migration.apply(RULES)
    for key in migration.keys():
        section, _, name = key.partition(".")
        renamed = _KEYS.get(key, f"{_SECTIONS.get(section, section)}.{name}" if name else key)
        if renamed not in options:
            continue
        value = migration.get(key)
        if isinstance(value, _Expression):
            migration.miss(key, "the file computes it; write the value")
            continue
        if key == "parallelism.enable_loss_parallel":
            value = not value
        if options[renamed] is str and not isinstance(value, bool):
            value = str(value)  # 2 of "2", which is read as a number
        if not fits(value, options[renamed]):
            migration.miss(key, f"{renamed} is {options[renamed]}")
        else:
            migration.take(key, renamed, value)


def _saves(migration: Migration) -> None:
    """Drop options of the last save that have no effect there, and are refused here."""
    enabled = [migration.get(f"checkpoint.{name}") for name in ("enable", "enable_checkpoint")]
    exports = [key for key in _EXPORTS if migration.get(key)]
    for key in [*exports, "checkpoint.export_dtype"]:
        if migration.get(key) is None:
            continue
        if False in enabled:
            migration.drop(key, "no checkpoints are saved")
        elif not exports:
            migration.drop(key, "a full checkpoint keeps the type of training")


def _model(migration: Migration) -> None:
    module = migration.get("model.name") or migration.get("module") or "llama3"
    flavor = migration.get("model.flavor") or migration.get("config") or "debugmodel"
    known = json.loads(TABLE.read_text())["configurations"]
    if module not in known:
        raise UserError(
            f"model {module} is none of the modules here{suggest(str(module), known)}; "
            "`torchtitan ls` lists them"
        )
    name = str(flavor).lower().replace("-", "_")
    tries = (name, f"{module}_{name}", f"{module}_{name}".removesuffix("_base"))
    found = next((one for one in tries if one in known[module]), "")
    if not found:
        listed = ", ".join(known[module])
        raise UserError(f"model {module}, flavor {flavor}: configurations here are {listed}")
    migration.module, migration.config = str(module), found
    for key in ("model.name", "module", "model.flavor", "config"):
        if migration.get(key) is not None:
            migration.change(key, f"--module {module} --config {found}")
    for key in ("model.tokenizer_path", "model.hf_assets_path", "hf_assets_path"):
        if migration.get(key) is not None:
            path = str(value := migration.get(key))
            if isinstance(value, _Expression):
                migration.miss(key, "the file computes it: --hf_assets_path DIR")
            elif "tests/assets/" in path and not Path(path).exists():
                migration.change(key, "a file of that repository; the embedded tokenizer serves")
            elif path.endswith(("tokenizer.model", "tokenizer.json")):
                folder = path.rpartition("/")[0] or "."
                migration.take(key, "hf_assets_path", folder, "the folder of the file")
            else:
                migration.take(key, "hf_assets_path", path)


def _data(migration: Migration) -> None:
    for key in ("training.dataset", "dataloader.dataset", "validation.dataset"):
        if (name := migration.get(key)) is None:
            continue
        option = "validator.dataset" if key.startswith("validation") else "dataloader.dataset"
        path = migration.get(f"{key}_path")
        if path is not None:
            migration.take(f"{key}_path", option, [str(path)])
            migration.drop(key, "the path names the data")
        elif name == "c4_test":
            why = "a small text of that repository; the built-in stories serve the same"
            migration.take(key, option, ["stories"], why)
        elif name == "c4_validation":
            migration.take(key, option, [], "the validation split of c4")
        else:
            migration.take(key, option, [name] if isinstance(name, str) else name)


def _batch(migration: Migration) -> None:
    """Set the global batch that accumulation gives, and the windows of a pipeline's micro-batch,
    where the file has the number of micro-batches."""
    keys = ("training.local_batch_size", "training.batch_size")
    given = next((migration.get(key) for key in keys if migration.get(key) is not None), None)
    size = given if type(given) is int else 0
    ranks, rest = divmod(migration.devices, _ranks_of_a_batch(migration))
    if (passes := migration.get(key := "training.gradient_accumulation_steps")) is not None:
        if migration.get("training.global_batch_size") not in (None, -1):
            migration.drop(key, "training.global_batch_size is given")
        elif not size or rest:
            migration.miss(key, "set --training.global_batch_size; --devices gives the devices")
        else:
            total = size * int(passes) * ranks
            why = f"{size} x {passes} x {ranks} data-parallel ranks"
            migration.change(key, why, training__global_batch_size=total)
    for section in ("experimental", "parallelism"):
        key = f"{section}.pipeline_parallel_microbatches"
        if (number := migration.get(key)) is None:
            continue
        if not size or int(number) < 1 or size % int(number):
            why = "the local batch by it: --parallelism.pipeline_parallel_microbatch_size"
            migration.miss(key, why)
        else:
            windows = size // int(number)
            why = f"the local batch of {size} by {number} micro-batches"
            migration.change(key, why, parallelism__pipeline_parallel_microbatch_size=windows)


def _ranks_of_a_batch(migration: Migration) -> int:
    """Return the devices that compute one local batch together."""
    names = tuple(f".{kind}_parallel_degree" for kind in ("tensor", "pipeline", "context"))
    degrees = (migration.get(key) for key in migration.keys() if key.endswith(names))
    return math.prod(max(1, int(degree)) for degree in degrees)


def _known_options(migration: Migration) -> dict[str, object]:
    known = known_configuration(migration.module, migration.config)
    assert known is not None
    return {key: known.types[key] for key in known.options}


_FLOAT8 = "use a configuration with float8 (llama3_debugmodel_float8), or write one"

RULES: Mapping[str, Rule] = {
    "model.converters": missing(_FLOAT8),
    "model.print_after_conversion": unneeded("`torchtitan inspect` shows the model"),
    "job.description": unneeded("a note"),
    "job.print_args": unneeded("config.yaml has all values"),
    "job.print_config": unneeded("config.yaml has all values"),
    "job.save_config_file": unneeded("config.yaml is always written"),
    "job.use_for_integration_test": unneeded("a note"),
    "metrics.rank_0_only": unneeded("LOG_RANK in the environment"),
    "metrics.save_for_all_ranks": unneeded("metrics are of all ranks"),
    "metrics.disable_color_printing": unneeded("colors are for terminals only"),
    "checkpoint.interval_type": unneeded("steps, the only way"),
    "checkpoint.create_seed_checkpoint": unneeded("initial weights follow --debug.seed"),
    "comm.trace_buf_size": missing("--comm.step_timeout_seconds finds hanging ranks"),
    "optimizer.fused": to(
        "optimizer.implementation", lambda value: "fused" if value else "foreach"
    ),
    "float8.enable_fsdp_float8_all_gather": missing(_FLOAT8),
    "float8.precompute_float8_dynamic_scale_for_fsdp": missing(_FLOAT8),
    "float8.filter_fqns": missing(_FLOAT8),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": missing(_FLOAT8),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": missing(_FLOAT8),
    "quantize.linear.float8.filter_fqns": missing(_FLOAT8),
    "float8.enable_float8_linear": missing(_FLOAT8),
    "training.enable_fused_rmsnorm": unneeded("norms need no option here"),
    "training.fsdp_reshard_after_forward": to("parallelism.fsdp_reshard_after_forward"),
}


class _Expression(str):
    """Source text of a value that the file computes."""


def values_in_python(text: str, name: str, path: str) -> dict[str, object]:
    """Return the values that a function of a `config_registry.py` writes as keywords, without
    running it: `optimizer=OptimizersContainer.Config(lr=8e-4)` is `optimizer.lr`.

    Raises:
        UserError: for a syntax error, or if there is no such function, or none that builds a
            configuration.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid Python: {error}") from error
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    calls = {
        function: call for function, node in functions.items() if (call := _returned_call(node))
    }
    if name and name not in calls:
        raise UserError(f"{path} has no configuration {name}{suggest(name, calls)}")
    if not calls:
        raise UserError(f"{path} has no function that returns a configuration")
    if not name and len(calls) > 1:
        raise UserError(
            f"{path} has {len(calls)} configurations ({', '.join(calls)}); choose one with --config"
        )
    function = name or next(iter(calls))
    values = flat(_keywords(calls[function]))
    family, _, flavor = function.partition("_")
    values.setdefault("model.name", values.pop("model_spec.name", None) or family)
    values.setdefault("model.flavor", values.pop("model_spec.flavor", None) or flavor)
    return values


def _returned_call(function: ast.FunctionDef) -> ast.Call | None:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            return node.value if node.value.keywords else None
    return None


def _keywords(call: ast.Call) -> dict[str, object]:
    """Return the keywords of a call whose values are written out, nested."""
    values: dict[str, object] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        value = keyword.value
        if isinstance(value, ast.Call):
            inner = _keywords(value)
            if keyword.arg == "model_spec" and value.args:
                first = value.args[0]
                inner["flavor"] = first.value if isinstance(first, ast.Constant) else None
            values[keyword.arg] = inner
        else:
            try:
                values[keyword.arg] = ast.literal_eval(value)
            except ValueError:
                values[keyword.arg] = _Expression(f"<{ast.unparse(value)}>")
            except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
                raise UserError(f"{keyword.arg} has no value: {error}") from error
    return values
