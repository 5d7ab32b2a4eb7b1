"""Shortens values for error messages."""

from reprlib import Repr

BITS_MAX = 2000
"""Bits of an integer whose digits are shown. Python refuses to write more than a limit of digits,
4,300 by default and never below 640."""


class _ShortRepr(Repr):
    """The standard library's short repr, which raises ValueError for integers over the limit."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > BITS_MAX:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)


short = _ShortRepr().repr
