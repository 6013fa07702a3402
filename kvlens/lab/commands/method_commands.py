"""Commands that methods bring themselves: their part `commands`, found when the command is asked for."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from kvlens import methods
from kvlens.methods import parts

OF_METHODS = "kvlens.lab.commands.methods"
"""the package of the methods' own parts (kvlens.methods.parts)"""


class MethodCommands(TyperGroup):
    """A group whose commands are its own and, by the method's name, the function of the group's name in a method's part
    `commands`: `kvlens calibrate NAME` is `calibrate` there. Raises ValueError for a method that brings none."""

    def _bringing(self) -> list[str]:
        return [
            name
            for name, method in methods.registry().items()
            if hasattr(parts.part(method, "commands", OF_METHODS), str(self.name))
        ]

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *self._bringing()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        value = super().get_command(ctx, cmd_name)
        if value is not None:
            return value
        if cmd_name not in self._bringing():
            known_values = ", ".join(self.list_commands(ctx))
            raise ValueError(f"there is nothing to {self.name} for '{cmd_name}'; there is for {known_values}.")
        item = typer.Typer(add_completion=False)
        item.command(cmd_name)(getattr(parts.part(methods.get(cmd_name), "commands", OF_METHODS), str(self.name)))
        return typer.main.get_command(item)
