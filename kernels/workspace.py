"""What the kernels of one engine hold between launches: switches, counters of arrivals, scratch memory of a library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kernels import hardware
from kernels.linear.scaled_gemms import ScaledProducts
from kernels.linear.tuned_gemms import Products

# Takes a launch in the place of the kernel: (kernel, grid, *arguments, **constants and options).
Launcher = Callable[..., Any]


class Workspace:
    """Handed to every op as its first argument. Nothing of it is shared with another engine of the process.

    pdl: kernels use programmatic dependent launch: they are launched with `launch_pdl` and PDL=True, call
    gdc_launch_dependents() first and touch nothing that another kernel wrote, or may still be reading, before
    gdc_wait(). On Hopper and later, unless it is switched off.
    table: the name of the device's tuned numbers (`kernels.tuned.tables`).
    products: what multiplies many rows by algorithms that were measured; None when that is switched off.
    fast_sums: many rows of 8-bit floats with scales by rows may be added up in the tensor cores' own precision.
    scaled_products: what multiplies many rows of 8-bit floats; None when `tuned_gemms` is switched off.

    Launches that share a workspace must run in one stream order, but for those of loading (`repack`, `round_rows`),
    which use none of it.
    """

    def __init__(
        self, device: torch.device, dependent_launch: bool = True, tuned_gemms: bool = True, fast_sums: bool = False
    ) -> None:
        self.device = device
        self.table = hardware.tuned(device)
        self.pdl = dependent_launch and hardware.dependent_launch(device)
        self.products = Products() if tuned_gemms else None
        self.scaled_products = ScaledProducts() if tuned_gemms else None
        self.fast_sums = fast_sums
        self._counters: dict[tuple[str, int], torch.Tensor] = {}
        self._side: torch.cuda.Stream | None = None
        self._launcher: Launcher | None = None

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        """What launches a jitted kernel on `grid`, called with its arguments."""
        if self._launcher is not None:
            return partial(self._launcher, kernel, grid)
        return partial(kernel.run, grid=grid, warmup=False)

    @contextmanager
    def launched_by(self, launcher: Launcher) -> Iterator[None]:
        """Within, `launcher` takes every launch instead of the kernel."""
        self._launcher = launcher
        try:
            yield
        finally:
            self._launcher = None

    def counters(self, use: str, count: int) -> torch.Tensor:
        """[count] int32, zeros that every launch leaves at zero: one tensor for each use and count. Made by the eager
        call before any capture; launches that may run at once name different uses."""
        key = (use, count)
        held = self._counters.get(key)
        if held is None:
            held = self._counters[key] = torch.zeros(count, dtype=torch.int32, device=self.device)
        return held

    @contextmanager
    def branch(self, wanted: bool = True) -> Iterator[Callable[[], None]]:
        """Launches of the block run beside those after it, when they are captured in a graph; else in order, as ever.

        Gives what joins the two again: to be called after the block, before anything that needs its results. The
        branches must not write to the same memory, counters of arrivals included.
        """
        runs = wanted and self._launcher is None and self.device.type == "cuda"
        if not runs or not torch.cuda.is_current_stream_capturing():
            yield lambda: None
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        main, side = torch.cuda.current_stream(self.device), self._side
        side.wait_stream(main)
        with torch.cuda.stream(side):
            yield lambda: main.wait_stream(side)
