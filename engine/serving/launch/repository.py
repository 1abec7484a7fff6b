"""Write model-repository entries: config.pbtxt from the wire tables, model.py of a few lines."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from engine import env
from engine.gguf_file import GgufError
from engine.models import registry
from engine.models.config import ModelConfig
from engine.models.reader import ConfigError
from engine.serving.frontend import tensorrt_llm
from engine.serving.frontend.renderer import Renderer
from engine.serving.frontend.settings import SettingsError, parse, template_file
from engine.serving.frontend.settings import checkpoint as settings_folder
from engine.serving.launch import catalog, gguf_folder, weight_files
from engine.serving.link import protocol
from engine.serving.link.protocol import Tensor
from engine.text import Tokenizer
from engine.types import RequestError, shown

MAX_NAME = 128  # with what is added to it, a folder's name of at most 255 bytes
MAX_FRONTENDS = 64  # processes; the engine is outrun by far fewer
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}}")

_GENERATED = "# Written by `nereid add` from engine/serving/link/protocol.py; parameters are yours to edit.\n"

_LLM_MODEL_PY = '''"""A language model: vllm_backend's tensors over Nereid's engine. Settings stand in config.pbtxt."""

from engine.serving.llm_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

_TOKENIZER_MODEL_PY = '''"""Text or chat messages to token ids, and token ids to text."""

from engine.serving.tokenizer_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

_STAGE_MODEL_PY = '''"""TensorRT-LLM's {name}."""

from engine.serving.tensorrt_llm_models import {kind} as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def llm_config(name: str, parameters: Mapping[str, str], frontends: int = 2, decoupled: bool = True) -> str:
    """config.pbtxt of an LLM model, decoupled or with one response a request.

    It has `frontends` instances over one engine process, each a group of its own: the server can then replace one that
    died (`replacement`). Groups that are equal are one to it, so their host policies differ; a policy that the server
    was not told of does nothing."""
    return (
        _head(name, 0)
        + f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}\n"
        + _frontends(frontends)
        + _parameters(parameters)
        + _tensors("input", protocol.LLM_INPUTS)
        + _tensors("output", protocol.LLM_OUTPUTS)
    )


def tokenizer_config(name: str, parameters: Mapping[str, str], instances: int = 1) -> str:
    """config.pbtxt of a tokenizer model."""
    return (
        _head(name, 0)
        + f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n"
        + _parameters(parameters)
        + _tensors("input", protocol.TOKENIZER_INPUTS)
        + _tensors("output", protocol.TOKENIZER_OUTPUTS)
    )


def ensemble_config(name: str, tokenizer: str, llm: str) -> str:
    """config.pbtxt of the ensemble tokenizer -> LLM.

    max_batch_size 1 over composing models of max_batch_size 0 gives clients TensorRT-LLM's shapes, [1, 1] but for the
    text's [1], while the composing models see [1].
    """
    passed = [(t.name, t.name) for t in protocol.ENSEMBLE_PASSED]
    outputs = [(source, target) for target, source in protocol.ENSEMBLE_OUTPUT_MAP.items()]
    steps = [
        _step(tokenizer, [(protocol.TEXT_INPUT, protocol.TEXT_INPUT)], [(protocol.INPUT_IDS, protocol.INPUT_IDS)]),
        _step(llm, [(protocol.INPUT_IDS, protocol.INPUT_IDS), *passed], outputs),
    ]
    return (
        _head(name, 1, platform='platform: "ensemble"')
        + _tensors("input", protocol.ENSEMBLE_INPUTS)
        + _tensors("output", protocol.ENSEMBLE_OUTPUTS)
        + "ensemble_scheduling {\n  step [\n"
        + ",\n".join(steps)
        + "\n  ]\n}\n"
    )


def stage_config(name: str, parameters: Mapping[str, str], inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> str:
    """config.pbtxt of a model of the tokenizer's stage that takes batches, as TensorRT-LLM's do."""
    return (
        _head(name, tensorrt_llm.MAX_BATCH)
        + "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
        + _parameters(parameters)
        + _tensors("input", inputs)
        + _tensors("output", outputs)
    )


def tensorrt_llm_config(name: str, llm: str) -> str:
    """config.pbtxt of TensorRT-LLM's `tensorrt_llm`: the LLM's tensors under its names, with its batch dimension."""
    inputs = [(source, name) for name, source in tensorrt_llm.INPUT_MAP.items()]
    outputs = [(source, name) for name, source in tensorrt_llm.OUTPUT_MAP.items()]
    return (
        _head(name, 1, platform='platform: "ensemble"')
        + _tensors("input", tensorrt_llm.INPUTS)
        + _tensors("output", tensorrt_llm.OUTPUTS)
        + "ensemble_scheduling {\n  step [\n"
        + _step(llm, inputs, outputs)
        + "\n  ]\n}\n"
    )


def batches_config(name: str, llm: str, parameters: Mapping[str, str], decoupled: bool = True) -> str:
    """config.pbtxt of a model with the ensemble's tensors that takes batches of prompts, over an LLM's engine."""
    return (
        _head(name, tensorrt_llm.MAX_BATCH)
        + f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}\n"
        + _frontends(1)
        + _parameters({**parameters, "engine": llm})
        + _tensors("input", protocol.ENSEMBLE_INPUTS)
        + _tensors("output", protocol.BATCHED_OUTPUTS)
    )


class AddError(Exception):
    """An entry cannot be written; the message says why."""


def add(
    checkpoint: Path,
    name: str,
    repository: Path,
    *,
    settings: Mapping[str, str],
    tokenizer: bool,
    ensemble: bool,
    frontends: int,
    tensorrt_llm_names: bool = False,
    decoupled: bool = True,
) -> list[Path]:
    """Write the entries NAME, NAME_tokenizer and NAME_ensemble for a checkpoint folder, or for a GGUF file; returns
    their folders.

    tensorrt_llm_names: also entries with the names of TensorRT-LLM's, over the same engine process. decoupled: false
    for a model with one response a request, which unary calls reach.

    Refuses what a load would refuse. Raises AddError, and then nothing has been written.
    """
    _check_asked(checkpoint, name, settings)
    own = gguf_folder.is_gguf(checkpoint)
    folder = held(checkpoint, repository / name)
    tokenizer_name, ensemble_name = f"{name}_tokenizer", f"{name}_ensemble"
    names = [name, *([tokenizer_name] if tokenizer else []), *([ensemble_name] if ensemble else [])]
    names += tensorrt_llm.NAMES if tensorrt_llm_names else ()
    _check_free(repository, name, names, tensorrt_llm_names)
    with tempfile.TemporaryDirectory(prefix="nereid-add-", dir=env.temporary_folder()) as made:
        read = folder
        try:
            if own:
                read = Path(made) / "checkpoint"
                read.mkdir()
                gguf_folder.write(checkpoint, read)
            parameters = {"model": str(folder), **_checked(read, settings, repository / name)}
        except (ConfigError, SettingsError, RequestError, GgufError) as error:
            raise AddError(str(error)) from None
        try:
            write_llm(repository, name, parameters, frontends, decoupled)
            if own:
                shutil.copytree(read, folder, symlinks=True)
            text = {"model": parameters.get("tokenizer") or str(folder)}
            if tokenizer:
                template = {key: value for key, value in parameters.items() if key == "chat_template"}
                write_tokenizer(repository, tokenizer_name, {**text, **template})
            if ensemble:
                write_ensemble(repository, ensemble_name, tokenizer_name, name)
            if tensorrt_llm_names:
                write_tensorrt_llm(repository, name, text, parameters, decoupled)
        except OSError as error:
            for entry in names:
                shutil.rmtree(repository / entry, ignore_errors=True)
            raise AddError(f"{repository} cannot be written to: {error.strerror}") from None
    return [repository / entry for entry in names]


def _check_asked(checkpoint: Path, name: str, settings: Mapping[str, str]) -> None:
    """Raises AddError for arguments that no entry can be written for."""
    if not NAME.fullmatch(name):
        raise AddError(
            f"the name {shown(name)!r} cannot be a model's: use up to {MAX_NAME} letters, digits, '_', '-' and '.'"
        )
    if "model" in settings:
        raise AddError(
            f"--set model={shown(settings['model'])}: the model is CHECKPOINT, {checkpoint}: leave the setting out, or "
            "give its folder as CHECKPOINT"
        )
    if not gguf_folder.is_gguf(checkpoint) and not (checkpoint / "config.json").is_file():
        raise AddError(
            f"{checkpoint} has no config.json: give a checkpoint folder in Hugging Face layout, or a GGUF file"
        )


def _check_free(repository: Path, name: str, entries: Sequence[str], tensorrt_llm_names: bool) -> None:
    """Raises AddError when an entry of the model `name` is there already, or would be two."""
    if tensorrt_llm_names and name in tensorrt_llm.NAMES:
        raise AddError(f"{name} is one of the names that --tensorrt-llm-names writes: choose another --name")
    for entry in entries:
        if (repository / entry).exists():
            raise AddError(f"{repository / entry} exists already: remove it or choose another --name")


def _checked(checkpoint: Path, settings: Mapping[str, str], entry: Path) -> dict[str, str]:
    """The parameters of an entry besides `model`, once everything that a load would refuse has been looked at. Text is
    that of the folder that the setting `tokenizer` names, where it does.

    Raises ConfigError, SettingsError or RequestError."""
    model, _ = registry.load(checkpoint)
    registry.quantization(checkpoint)
    chosen = {**_needed(model), **settings}
    parse({"model": str(checkpoint), **chosen}, entry)
    if chosen.get("load_format") != "dummy":
        weight_files.check(checkpoint)
    text = checkpoint
    if chosen.get("tokenizer"):
        text = settings_folder(chosen["tokenizer"], entry)
        chosen["tokenizer"] = str(text)
    Tokenizer.from_folder(text)
    template = chosen.get("chat_template")
    if template is not None:
        chosen["chat_template"] = template = str(template_file(template, entry))
    Renderer(text, file=None if template is None else Path(template)).close()
    return chosen


def held(checkpoint: Path, entry: Path) -> Path:
    """The folder that an entry for `checkpoint` reads: of a GGUF file, one inside the entry."""
    return entry.resolve() / "1" / "checkpoint" if gguf_folder.is_gguf(checkpoint) else checkpoint.resolve()


def _needed(model: ModelConfig) -> dict[str, str]:
    """Settings that a model cannot be served without."""
    return {} if model.block_multiple == 1 else {"cache.block_size": str(model.block_multiple)}


def write_llm(
    repository: Path, name: str, parameters: Mapping[str, str], frontends: int = 2, decoupled: bool = True
) -> Path:
    """Write `repository/name` for an LLM. Raises FileExistsError when the entry exists."""
    return _write(repository / name, llm_config(name, parameters, frontends, decoupled), _LLM_MODEL_PY)


def write_tokenizer(repository: Path, name: str, parameters: Mapping[str, str]) -> Path:
    """Write `repository/name` for a tokenizer. Raises FileExistsError when the entry exists."""
    return _write(repository / name, tokenizer_config(name, parameters), _TOKENIZER_MODEL_PY)


def write_ensemble(repository: Path, name: str, tokenizer: str, llm: str) -> Path:
    """Write `repository/name` for the ensemble of two models. Raises FileExistsError when the entry exists."""
    return _write(repository / name, ensemble_config(name, tokenizer, llm), None)


def write_tensorrt_llm(
    repository: Path, llm: str, parameters: Mapping[str, str], settings: Mapping[str, str], decoupled: bool = True
) -> None:
    """Write entries with TensorRT-LLM's names over an LLM's engine process. Raises FileExistsError when one exists.

    parameters: of the stages of text. settings: the LLM's own.
    """
    stages = (
        ("Preprocessing", tensorrt_llm.PREPROCESSING_INPUTS, tensorrt_llm.PREPROCESSING_OUTPUTS),
        ("Postprocessing", tensorrt_llm.POSTPROCESSING_INPUTS, tensorrt_llm.POSTPROCESSING_OUTPUTS),
    )
    for kind, inputs, outputs in stages:
        name = kind.lower()
        config = stage_config(name, parameters, inputs, outputs)
        _write(repository / name, config, _STAGE_MODEL_PY.format(name=name, kind=kind))
    _write(repository / "tensorrt_llm", tensorrt_llm_config("tensorrt_llm", llm), None)
    for name in ("tensorrt_llm_bls", "ensemble"):
        _write(repository / name, batches_config(name, llm, settings, decoupled), _LLM_MODEL_PY)


def _write(folder: Path, config: str, model_py: str | None) -> Path:
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if model_py is None:
        (version / ".gitkeep").touch()  # the server wants a version folder even where there is nothing to put in it
    else:
        (version / "model.py").write_text(model_py)
        catalog.compile_ahead(version / "model.py")
    return folder


def _head(name: str, max_batch_size: int, platform: str = 'backend: "python"') -> str:
    return f'{_GENERATED}name: "{name}"\n{platform}\nmax_batch_size: {max_batch_size}\n'


def frontend_groups(count: int) -> list[dict[str, str]]:
    """The instance groups of so many frontends, by the fields of config.pbtxt."""
    return [{"kind": "KIND_MODEL", "host_policy": f"frontend-{number}"} for number in range(count)]


def _frontends(count: int) -> str:
    groups = [
        f'  {{ kind: {group["kind"]} host_policy: "{group["host_policy"]}" }}' for group in frontend_groups(count)
    ]
    return "instance_group [\n" + ",\n".join(groups) + "\n]\n"


def _parameters(parameters: Mapping[str, str]) -> str:
    lines = [f"  {{ key: {json.dumps(k)} value {{ string_value: {json.dumps(v)} }} }}" for k, v in parameters.items()]
    return "parameters [\n" + ",\n".join(lines) + "\n]\n"


def _tensors(kind: str, tensors: Iterable[Tensor]) -> str:
    lines = []
    for t in tensors:
        dims = ", ".join(map(str, t.dims))
        optional = " optional: true" if kind == "input" and t.optional else ""
        lines.append(f'  {{ name: "{t.name}" data_type: TYPE_{t.dtype} dims: [ {dims} ]{optional} }}')
    return f"{kind} [\n" + ",\n".join(lines) + "\n]\n"


def _step(model: str, inputs: Iterable[tuple[str, str]], outputs: Iterable[tuple[str, str]]) -> str:
    maps = [f'      input_map {{ key: "{k}" value: "{v}" }}' for k, v in inputs]
    maps += [f'      output_map {{ key: "{k}" value: "{v}" }}' for k, v in outputs]
    return f'    {{\n      model_name: "{model}"\n      model_version: -1\n' + "\n".join(maps) + "\n    }"
