"""Two tiers of KV memory: tables, transfers, the ledger and the budget account."""

from kvlens.memory.account import BudgetAccount
from kvlens.memory.cold import Codec, RawCodec, Unit
from kvlens.memory.hot import FREE, ROLE
from kvlens.memory.placement import Placement, Selection
from kvlens.memory.spantable import WINDOW
from kvlens.memory.tiers import Memory

__all__ = ["FREE", "ROLE", "WINDOW", "BudgetAccount", "Codec", "Memory", "Placement", "RawCodec", "Selection", "Unit"]
