"""The budget account: every tensor a run keeps on the device for KV purposes, in bytes, at every moment."""

from __future__ import annotations

import torch


class BudgetAccount:
    """Owns the sum. Tensors are held under a name; their storage is counted once, whole, whether used or not.

    `peak` is the largest sum since `start_step`. `limit` is None (no limit) or bytes; `hold` refuses to pass it.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._held: dict[str, dict[int, int]] = {}
        self._apart: dict[str, tuple[str, int]] = {}
        self.resident = 0
        self.peak = 0

    def hold(self, name: str, *tensors: torch.Tensor) -> None:
        """Count `tensors` under `name` (replacing what was held there). Raises AssertionError past the limit: a method
        that gets there has a wrong plan, since infeasible budgets are refused before."""
        self._held[name] = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self._recount()

    def release(self, name: str) -> None:
        self._held.pop(name, None)
        self._recount()

    def set_apart(self, name: str, of: str, size: int) -> None:
        """Say `size` of the bytes held under `of` under a name of their own."""
        self._apart[name] = of, size

    def by_name(self) -> dict[str, int]:
        """Bytes held under each name."""
        named = {name: sum(storages.values()) for name, storages in self._held.items()}
        for name, (of, size) in self._apart.items():
            named[of] -= size
            named[name] = named.get(name, 0) + size
        return named

    def start_step(self) -> None:
        self.peak = self.resident

    def _recount(self) -> None:
        merged: dict[int, int] = {}
        for storages in self._held.values():
            merged.update(storages)
        self.resident = sum(merged.values())
        self.peak = max(self.peak, self.resident)
        if self.limit is not None and self.resident > self.limit:
            raise AssertionError(f"device holds {self.resident} bytes, the budget is {self.limit}: {self.by_name()}")
