"""quant_method "awq" (arXiv:2306.00978), as AutoAWQ writes it for its "gemm" kernels."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.reader import Reader
from engine.quant.methods.groups import group_size
from engine.quant.scheme import PackedScheme

# Of the program that wrote or runs it.
SILENT = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")


@dataclass(frozen=True, slots=True)
class Awq:
    """Every projection of a layer is stored so, less those whose name holds one of `ignored`."""

    stored: PackedScheme
    ignored: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        return 1 + len(self.ignored)

    def scheme(self, module: str) -> PackedScheme | None:
        return self.stored if ".layers." in module and not any(name in module for name in self.ignored) else None


def read(reader: Reader) -> Awq:
    """Raises ConfigError for a value that is not implemented."""
    bits = reader.require("bits", 4)
    reader.require("zero_point", True, default=True)
    reader.require("version", "gemm", "GEMM", default="gemm")
    reader.skip(*SILENT)
    scheme = PackedScheme("awq", bits, group_size(reader, "group_size"), zeros=True)
    return Awq(scheme, tuple(reader.items(str, "modules_to_not_convert") or []))
