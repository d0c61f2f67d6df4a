r"""LaTeX of checked expressions: SymPy's, with legible sums over several indices."""

from typing import Any

import sympy as sp
from sympy.printing.latex import LatexPrinter


class _Printer(LatexPrinter):
    """SymPy stacks the ranges of a double sum under one sign, where small type overlaps."""

    def _print_Sum(self, e: sp.Sum) -> str:
        if len(e.limits) == 1 or any(len(limit) != 3 for limit in e.limits):
            return super()._print_Sum(e)
        signs, ranges = "", [(limit[1], limit[2]) for limit in e.limits]
        # SymPy writes the innermost range first, a reader the outermost.
        for bounds in dict.fromkeys(reversed(ranges)):
            names = [self._print(limit[0]) for limit in e.limits if limit[1:] == bounds]
            low, high = (self._print(bound) for bound in bounds)
            signs += rf"\sum_{{{','.join(names)}={low}}}^{{{high}}} "
        summand = self._print(e.function)
        return signs + (rf"\left({summand}\right)" if e.function.is_Add else summand)


def latex(expression: Any) -> str:
    r"""``Sum(f, (a, 1, d), (b, 1, d)) -> \sum_{a,b=1}^{d} f``; anything else as SymPy prints it."""
    return _Printer().doprint(expression)
