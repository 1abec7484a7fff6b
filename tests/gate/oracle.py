"""What transformers says: a random checkpoint of a shape, the gate's sequences, and full log-probabilities of each
position, in float32 and in bfloat16.

Made once and kept in a folder keyed by the shape and by this file, so that later runs (and machines without
transformers, such as a GPU box) only read it. It is stored small, to be carried there: weights and logits in bfloat16
where that loses nothing.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gate.shapes import VOCAB, Shape

NUM_SEQUENCES = 48
FORCED = 16
# Tokens whose log-probabilities are compared at a position: the oracle's best.
TOP = 8
# Every length around a block's border, then some of all sizes.
EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256)
LONG_PROMPT = 1024
SEED = 20251120
# Of transformers, for gpt-oss: major and minor.
OLDEST = (5, 23)
LOGIT_STD = 3.0
BRANCH_ENDS = ("o_proj.weight", "down_proj.weight", "experts.down_proj", "out_proj.weight", "o_b_proj.weight")


class WideProducts(TorchDispatchMode):
    """Within, products of bfloat16 are taken in float32 and rounded once, as a CPU with bfloat16 instructions does.

    Without such instructions torch takes them 10 to 30 times slower.
    """

    _products = frozenset(
        {
            torch.ops.aten.mm.default,
            torch.ops.aten.bmm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.baddbmm.default,
            torch.ops.aten.linear.default,
            torch.ops.aten.matmul.default,
        }
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self._products or args[0].dtype is not torch.bfloat16:
            return func(*args, **(kwargs or {}))
        return func(*(None if each is None else each.float() for each in args), **(kwargs or {})).bfloat16()


@dataclass(frozen=True)
class Sequence:
    """A prompt and FORCED tokens after it; logprobs[dtype] is [FORCED + 1, VOCAB], from the prompt's last token on."""

    prompt: list[int]
    forced: list[int]
    logprobs: dict[str, np.ndarray]


@dataclass(frozen=True)
class Golden:
    """A checkpoint folder and what its model says about NUM_SEQUENCES sequences and one long one."""

    folder: Path
    sequences: list[Sequence]
    long: Sequence


def golden(shape: Shape, cache: Path) -> Golden:
    """The golden data of a shape, from `cache` or made now."""
    digest = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode() + Path(__file__).read_bytes())
    folder = cache / f"{shape.name}-{digest.hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{shape.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, and one of them is enough for this
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as made:
                _make(shape, Path(made))
                Path(made).rename(folder)
    with np.load(folder / "golden.npz") as file:
        count = int(file["count"])
        sequences = [
            Sequence(
                file[f"{i}.prompt"].tolist(),
                file[f"{i}.forced"].tolist(),
                {dtype: _logprobs(file[f"{i}.{dtype}"]) for dtype in shape.dtypes},
            )
            for i in range(count)
        ]
    return Golden(folder, sequences[:-1], sequences[-1])


def _make(shape: Shape, folder: Path) -> None:
    model = random_model(shape)
    halves = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=halves)
    generator = np.random.default_rng(SEED)
    lengths = [*EDGES, *generator.integers(4, 257, NUM_SEQUENCES - len(EDGES)).tolist()]
    lengths = [*lengths[:: NUM_SEQUENCES // shape.sequences], shape.long_prompt]
    kept: dict[str, Any] = {"count": len(lengths)}
    prompts = [generator.integers(0, VOCAB, length).tolist() for length in lengths]
    for i, prompt in enumerate(prompts):
        _attend(model, "float32", len(prompt))
        kept[f"{i}.prompt"], kept[f"{i}.forced"] = np.array(prompt), np.array(_continue(model, prompt))
    for dtype in shape.dtypes:
        # Loaded, and not cast: a cast would round the rotary frequencies too, and what a model keeps in float32.
        model = type(model).from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
        for i, prompt in enumerate(prompts):
            _attend(model, dtype, len(prompt))
            tokens = torch.tensor([[*prompt, *kept[f"{i}.forced"]]])
            with torch.inference_mode(), WideProducts():
                logits = model(tokens, logits_to_keep=FORCED + 1).logits[0]
            # numpy knows no bfloat16: its bits are kept
            kept[f"{i}.{dtype}"] = (logits.view(torch.int16) if logits.dtype == torch.bfloat16 else logits).numpy()
    np.savez_compressed(folder / "golden.npz", **kept)


def _attend(model: Any, dtype: str, length: int) -> None:
    """Attention as transformers writes it out; for long prompts in float32 torch's fused one, where the model has it:
    it takes a quarter to a half of the time, and log-probabilities differ by a tenth of the gate's limit. In bfloat16
    it rounds elsewhere."""
    fused = dtype == "float32" and length > LONG_PROMPT and model._supports_sdpa
    model.set_attn_implementation("sdpa" if fused else "eager")


def _logprobs(kept: np.ndarray) -> np.ndarray:
    logits = torch.from_numpy(kept)
    logits = logits.view(torch.bfloat16) if logits.dtype == torch.int16 else logits
    return logits.float().log_softmax(-1).numpy()


def random_model(shape: Shape) -> Any:
    """A float32 model whose weights are bfloat16 values, of a scale that keeps its logits far from flat.

    Logits get a standard deviation of about LOGIT_STD. Each branch adds `shape.branch` of what it could to the
    residual stream, as in trained models: in bfloat16 transformers itself would otherwise stray beyond the limits.
    Routers are sure of their first experts, as trained ones are: those near the border, which rounding swaps, weigh
    little. A tied model's last norm flips signs at random, or every token would predict itself.
    """
    import transformers

    found = transformers.__version__
    if shape.kind == "GptOss" and tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise RuntimeError(
            f"transformers {found} says something else of gpt-oss than {'.'.join(map(str, OLDEST))} and later, which "
            "pyproject.toml asks for: install one of them, or bring .cache/gate from a machine that has one"
        )
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{shape.kind}Config")(**copy.deepcopy(shape.config))  # which it writes to
    architecture = f"{shape.kind.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(SEED)
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
                if tied and name == "model.norm.weight":
                    sign = torch.randn(parameter.shape, generator=generator).sign()
                    offset = 0.0 if parameter.mean() > 0.5 else 1.0
                    parameter.copy_((parameter + offset) * sign - offset)
            else:
                embeds = "embed_tokens" in name
                if embeds and not tied:
                    parameter.normal_(0.0, 1.0, generator=generator)
                else:
                    gain = _gain(name, embeds, shape, getattr(config, "routed_scaling_factor", 1.0))
                    parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator).copy_(buffer.bfloat16())
            if name.endswith("tid2eid"):
                experts = config.n_routed_experts
                order = torch.rand(buffer.shape[0], experts, generator=generator).argsort(-1)
                buffer.copy_(order[:, : buffer.shape[1]])
    return model


def _gain(name: str, embeds: bool, shape: Shape, routed_scale: float) -> float:
    """Standard deviation of a matrix's outputs for inputs of standard deviation 1."""
    if embeds or "lm_head" in name:
        return LOGIT_STD
    if name.endswith(("gate.weight", "router.weight")):
        return shape.router
    if name.endswith(BRANCH_ENDS):
        return shape.branch / routed_scale if "experts.down" in name else shape.branch
    return 1.0


def _continue(model: Any, prompt: list[int]) -> list[int]:
    """The model's own greedy continuation: a free-running engine that is right then stays on the forced path."""
    past, tokens, forced = None, torch.tensor([prompt]), []
    with torch.inference_mode():
        for _ in range(FORCED):
            out = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            forced.append(int(tokens))
    return forced
