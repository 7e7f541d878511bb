"""Pruning in several rounds: gradual magnitude pruning, and lottery tickets with rewinding."""

from __future__ import annotations

from dataclasses import dataclass

from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.masking import Change, MaskingState, MethodState, Moment, Read


@dataclass(frozen=True)
class PruningRounds:
    """The steps that prune: every `interval` after `begin`, until `until_step`."""

    begin: int
    interval: int
    until_step: int

    @property
    def count(self) -> int:
        """How many rounds there are."""
        return (self.until_step - self.begin) // self.interval

    def number(self, step: int) -> int | None:
        """The number, from 1, of the round that is due after `step` steps; None if none is."""
        number, rest = divmod(step - self.begin, self.interval)
        return None if rest or number < 1 else number


class GradualPruning:
    """Prunes in every round, so that the kept entries only become fewer."""

    unfinished = None

    def __init__(
        self,
        live: LiveMasks,
        criterion: Criterion,
        rounds: PruningRounds,
        *,
        geometric: bool,
    ) -> None:
        """With `geometric`, each round removes the same share of what is left; without, the
        sparsity rises as a cubic. There is at least one round.
        """
        assert rounds.count >= 1
        self._live = live
        self._criterion = criterion
        self._rounds = rounds
        self._geometric = geometric
        self._is_done = False

    def before_step(self, now: Moment) -> Change | None:
        if self._is_done:
            return None
        number = self._rounds.number(now.step)
        if number is None:
            return None
        self._is_done = number == self._rounds.count
        self._live.prune(
            self._live.masks(self._criterion, lambda final: self._sparsity(number, final))
        )
        return Change(
            f"pruning {number} of {self._rounds.count}",
            self._live.figures(),
            is_ticket=self._is_done,
        )

    def state(self) -> MaskingState:
        return MaskingState(MethodState(is_done=self._is_done))

    def restore(self, standing: MethodState, read: Read) -> None:
        del read  # the masks come with the saved layers
        self._is_done = standing.is_done

    def _sparsity(self, number: int, final: float) -> float:
        sparsity = iterative_sparsity if self._geometric else gradual_sparsity
        return sparsity(number, final=final, rounds=self._rounds.count)


def gradual_sparsity(number: int, *, final: float, rounds: int) -> float:
    """The sparsity after `number` of `rounds` rounds; 0 before the first.

    s(r) = final · (1 − (1 − r / rounds)³): it rises fast at first (Zhu & Gupta 2017, eq. 1). After
    the last round it is exactly `final`.
    """
    assert 0 <= number <= rounds
    return final if number == rounds else final * (1 - (1 - number / rounds) ** 3)


def iterative_sparsity(number: int, *, final: float, rounds: int) -> float:
    """The sparsity after `number` of `rounds` rounds; 0 before the first.

    1 − s(r) = (1 − final)^(r / rounds): each round removes the same share of what is left
    (Frankle & Carbin 2019, section 1). After the last round it is exactly `final`.
    """
    assert 0 <= number <= rounds
    return final if number == rounds else 1 - (1 - final) ** (number / rounds)
