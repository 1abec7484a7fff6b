"""Settings of a served model, from the `parameters` of its config.pbtxt. Unknown keys are refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.config import EngineConfig
from engine.serving.frontend.taken_values import taken_values
from engine.types import shown

# Keys that the Python backend itself reads.
_BACKEND_KEYS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})
# Those of vllm_backend, and what they are called here.
_VLLM_BACKEND_KEYS = {"REPORT_CUSTOM_METRICS": "report_metrics", "ENABLE_VLLM_HEALTH_CHECK": "vllm_health_check"}


class SettingsError(ValueError):
    """A parameter of config.pbtxt that cannot be used; the message names it."""


ServedName = Annotated[str, Meta(min_length=1, max_length=256)]


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the frontends of a model behave.

    tokenizer: checkpoint folder to tokenize with; None takes `model`.
    chat_template: a file with the template of chats, in place of the checkpoint's.
    served_names: other names of the model in the OpenAI API.
    engine: another model whose engine process these frontends share: its settings of the engine must be these.
    stream_interval: tokens a streamed response waits for, after the first, which is sent at once.
    senders: threads of a frontend that send responses; each send waits for the server, so a second one helps.
    direct: short requests are taken in, and the responses of a step of few are sent, by the threads that bring them,
        without a hand-over to another thread, as long as nothing waits.
    restart_limit: starts of a crashed engine in a row before the model gives up.
    hang_timeout_s: an engine that says nothing for so long is killed and started again.
    request_timeout_s: longest that a request may take. A client whose whole answer comes over HTTP can go away unseen,
        so there is always a bound; a request may ask for less (timeout_s, or Triton's timeout).
    drain_s: how long an unload waits for streams to end by themselves.
    report_metrics: the model's metrics are on the server's page. vllm_backend's REPORT_CUSTOM_METRICS, off there.
    vllm_health_check: requests that find the engine dead for good get vllm_backend's sentence, and not the reason.
        vllm_backend's ENABLE_VLLM_HEALTH_CHECK; the engine is watched, and the model unloaded, with or without it.
    """

    tokenizer: str | None = None
    chat_template: str | None = None
    served_names: Annotated[tuple[ServedName, ...], Meta(max_length=16)] = ()
    engine: str | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=1024)] = 1
    senders: Annotated[int, Meta(ge=1, le=16)] = 2
    direct: bool = True
    restart_limit: Annotated[int, Meta(ge=0)] = 3
    hang_timeout_s: Annotated[float, Meta(gt=0.0)] = 120.0
    request_timeout_s: Annotated[float, Meta(gt=0.0)] = 3600.0
    drain_s: Annotated[float, Meta(ge=0.0)] = 30.0
    report_metrics: bool = True
    vllm_health_check: bool = False


class ModelSettings(msgspec.Struct, frozen=True):
    """What the parameters of one config.pbtxt say. tokenizer: the checkpoint folder to tokenize with."""

    engine: EngineConfig
    frontend: FrontendConfig
    tokenizer: Path


def parse(parameters: Mapping[str, str], folder: Path) -> ModelSettings:
    """Settings of an LLM model in `folder`. Keys are EngineConfig's fields, dotted for nested ones
    ("cache.num_blocks"), and FrontendConfig's; a relative path is relative to `folder`.

    Raises SettingsError.
    """
    engine: dict[str, Any] = {}
    frontend: dict[str, Any] = {}
    engine_keys = set(keys(EngineConfig))
    frontend_keys = set(keys(FrontendConfig))
    for name, value in parameters.items():
        if name in _BACKEND_KEYS:
            continue
        key = _VLLM_BACKEND_KEYS.get(name, name)
        if key != name and key in parameters:
            raise SettingsError(f"config.pbtxt says {key!r} and its other name {name!r}: leave one of the two out")
        if key in frontend_keys:
            frontend[key] = _value(value)
        elif key in engine_keys:
            *parents, leaf = key.split(".")
            target = engine
            for parent in parents:
                target = target.setdefault(parent, {})
            target[leaf] = _value(value)
        else:
            raise SettingsError(_unknown(key, engine_keys | frontend_keys))
    if not isinstance(engine.get("model"), str) or not engine["model"]:
        raise SettingsError("config.pbtxt has no parameter 'model': give the folder of a Hugging Face checkpoint")
    engine["model"] = str(checkpoint(engine["model"], folder))
    speculation = engine.get("speculation", {})
    if isinstance(speculation.get("model"), str):
        speculation["model"] = str(checkpoint(speculation["model"], folder))
    frontend_config = _convert(frontend, FrontendConfig)
    if frontend_config.chat_template is not None:
        file = str(template_file(frontend_config.chat_template, folder))
        frontend_config = msgspec.structs.replace(frontend_config, chat_template=file)
    tokenizer = checkpoint(frontend_config.tokenizer or engine["model"], folder)
    engine["tokenizer"] = str(tokenizer)
    return ModelSettings(_convert(engine, EngineConfig), frontend_config, tokenizer)


def checkpoint(value: str, folder: Path) -> Path:
    """The folder that a parameter names. Raises SettingsError when there is none."""
    path = _path(value, folder)
    if not path.is_dir():
        raise SettingsError(f"there is no checkpoint folder {path} (parameter of {folder / 'config.pbtxt'})")
    return path.resolve()


def template_file(value: str, folder: Path) -> Path:
    """The file that a parameter names. Raises SettingsError when there is none."""
    path = _path(value, folder)
    if not path.is_file():
        raise SettingsError(f"there is no chat template {path} (parameter of {folder / 'config.pbtxt'})")
    return path.resolve()


def _path(value: str, folder: Path) -> Path:
    path = Path(value.replace("$$TRITON_MODEL_DIRECTORY", str(folder))).expanduser()
    return path if path.is_absolute() else folder / path


def keys(config: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Dotted names of every field of a settings struct."""
    for field in msgspec.structs.fields(config):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _value(text: str) -> Any:
    """Lists and objects are JSON; everything else is converted by the field's type."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return text


def _convert(values: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(_refusal(str(error), values, kind)) from None


def _refusal(problem: str, values: dict[str, Any], kind: type[Any]) -> str:
    """A sentence for what msgspec says of `values`, which ends with the place: "… - at `$.cache.num_blocks`"."""
    key = problem.rpartition("`$.")[2].rstrip("`")
    names = key.split(".")
    taken = taken_values(kind, names)
    if taken is None:
        return f"a parameter of config.pbtxt cannot be used: {problem}"
    given: Any = values
    for name in names:
        given = given[name]
    return f"config.pbtxt: parameter {key!r} cannot be {shown(str(given))!r}: it takes {taken}"


def _unknown(key: str, known: set[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    leaf = [k for k in known if k.rpartition(".")[2] == key]
    hint = f"did you mean {(leaf or close)[0]!r}?" if leaf or close else f"known are {', '.join(sorted(known))}"
    return f"config.pbtxt has an unknown parameter {key!r}: {hint}"
