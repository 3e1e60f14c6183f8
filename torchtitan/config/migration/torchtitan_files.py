"""torchtitan's files in TOML, lines of its `config_registry.py`, and its command lines."""

import ast
import json
from collections.abc import Mapping
from typing import Any

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
    "experimental.pipeline_parallel_microbatches": (
        "parallelism.pipeline_parallel_microbatch_size"
    ),
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "parallelism.enable_loss_parallel": "parallelism.disable_loss_parallel",
    "metrics.rank_0_only": "",
}
"""Their key → our option with the same value."""


def migrate_torchtitan(migration: Migration) -> None:
    """Read torchtitan's own options, whose names ours mostly are."""
    _model(migration)
    _data(migration)
    options = _known_options(migration)
    migration.apply(RULES)
    for key in migration.keys():
        section, _, name = key.partition(".")
        renamed = _KEYS.get(key, f"{_SECTIONS.get(section, section)}.{name}" if name else key)
        if renamed not in options:
            continue
        value = migration.get(key)
        if key == "parallelism.enable_loss_parallel":
            value = not value
        if options[renamed] is str and not isinstance(value, bool):
            value = str(value)  # 2 of "2", which is read as a number
        if not fits(value, options[renamed]):
            migration.miss(key, f"{renamed} is {options[renamed]}")
        else:
            migration.take(key, renamed, value)


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
            path = str(migration.get(key))
            if path.endswith(("tokenizer.model", "tokenizer.json")):
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


def _known_options(migration: Migration) -> dict[str, Any]:
    known = known_configuration(migration.module, migration.config)
    assert known is not None
    return {key: known.types[key] for key in known.options}


_FLOAT8 = "use a configuration with float8 (llama3_debugmodel_float8), or write one"
_NO_SCALES = unneeded("the loss is a mean over all tokens of a step")

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
    "float8.enable_float8_linear": missing(_FLOAT8),
    "training.gradient_accumulation_steps": _NO_SCALES,
    "training.enable_fused_rmsnorm": unneeded("norms need no option here"),
    "training.fsdp_reshard_after_forward": to("parallelism.fsdp_reshard_after_forward"),
}


def values_in_python(text: str, name: str, path: str) -> dict[str, Any]:
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


def _keywords(call: ast.Call) -> dict[str, Any]:
    """Return the keywords of a call whose values are written out, nested."""
    values: dict[str, Any] = {}
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
                values[keyword.arg] = f"<{ast.unparse(value)}>"
    return values
