"""Which paddings move rows and columns alone: by trying all."""

from __future__ import annotations

from itertools import product

import torch

from hyfi_core.capture.program import Operator, Ref
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.windows.taps import of_pad

SPLIT = Split(Layout.even(6, 7, (1, 1)))


def test_paddings_of_height_and_width_are_taps_and_those_of_other_dims_are_not() -> None:
    for count in (1, 2, 3, 4):
        for widths in product((0, 1, 2), repeat=2 * count):
            args = (Ref("x"), list(widths), "constant", 2.5)
            tap = of_pad(Operator("pad", torch.ops.aten.pad.default, args, {}, ("y",), ""), (2, 3, 6, 7), SPLIT)
            assert (tap is None) == any(widths[4:])
            if tap is not None:
                assert (tap.window.x.padding, tap.window.y.padding) == (widths[0], widths[2] if count > 1 else 0)
                assert tap.fill == 2.5 and tap.window.y.kernel == tap.window.x.stride == 1
    for rest, fill in (((), 0.0), (("constant",), 0.0), (("constant", None), 0.0), (("reflect",), None)):
        op = Operator("pad", torch.ops.aten.pad.default, (Ref("x"), [1, 1], *rest), {}, ("y",), "")
        tap = of_pad(op, (2, 3, 6, 7), SPLIT)
        assert (tap.fill if tap is not None else None) == fill
