"""Says when the balance of experts stays bad for many steps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from k3train.config.schema import BalanceAlarms


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One number that has been above its threshold for ``steps`` steps in a row."""

    quantity: str
    """Name in ``BalanceAlarms``."""
    value: float
    """Of the worst layer in the last of these steps."""
    threshold: float
    layer: int
    steps: int


@dataclass(slots=True)
class AlarmBell:
    """Counts steps above each threshold; rings once, and again only after the number was below."""

    settings: BalanceAlarms
    above: dict[str, int] = field(default_factory=dict[str, int])
    """Steps in a row in which a number has been above its threshold."""

    def check(self, layers: dict[int, dict[str, float]]) -> list[Alarm]:
        """Alarms that one step's numbers, by layer, set off."""
        rung = []
        for name in (each.name for each in fields(self.settings) if each.name != "patience_steps"):
            threshold = getattr(self.settings, name)
            if threshold is None:
                continue
            layer = max(layers, key=lambda number: layers[number][name])
            value = layers[layer][name]
            self.above[name] = self.above.get(name, 0) + 1 if value > threshold else 0
            steps = self.above[name]
            if steps == self.settings.patience_steps:
                rung.append(Alarm(quantity=name, value=value, threshold=threshold, layer=layer, steps=steps))
        return rung
