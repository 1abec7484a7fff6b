"""quant_method "awq" (arXiv:2306.00978), as AutoAWQ writes it for its "gemm" kernels."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.reader import Reader
from engine.quant.methods.calibration import SILENT
from engine.quant.methods.groups import group_size
from engine.quant.scheme import PackedScheme


@dataclass(frozen=True, slots=True)
class Awq:
    """Every projection of a layer is stored so, and with `head` the head, less those whose name holds one of
    `ignored`."""

    stored: PackedScheme
    ignored: tuple[str, ...] = ()
    head: bool = False

    @property
    def steps(self) -> int:
        return 1 + len(self.ignored)

    def scheme(self, module: str) -> PackedScheme | None:
        meant = self.head or ".layers." in module
        return self.stored if meant and not any(name in module for name in self.ignored) else None


def read(reader: Reader) -> Awq:
    """Raises ConfigError for a value that is not implemented."""
    # AutoAWQ's own names, which a file beside config.json has.
    bits = reader.require("w_bit" if "w_bit" in reader else "bits", 4)
    group = group_size(reader, "q_group_size" if "q_group_size" in reader else "group_size")
    reader.require("zero_point", True, default=True)
    for key in ("version", "format", "checkpoint_format"):
        reader.require(key, "gemm", "GEMM", default="gemm")
    reader.require("method", "awq", default="awq")
    reader.require("pack_dtype", "int32", default="int32")
    reader.require("data_type", "int", default="int")
    reader.require("desc_act", False, default=False)
    # transformers writes it of every checkpoint; `zero_point` says it.
    reader.skip(*SILENT, "sym")
    scheme = PackedScheme("awq", bits, group, zeros=True)
    return Awq(scheme, tuple(reader.items(str, "modules_to_not_convert") or []), reader.read(bool, "lm_head", False))
