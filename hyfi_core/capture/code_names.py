"""Names in the byte code of a function and of functions inside it: globals, attributes and texts."""

from __future__ import annotations

import dis
import functools
import types


@functools.cache
def chains_in(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that code reads, with the attributes read of them: ``np.pi`` as ``("np", "pi")``."""
    chains: dict[tuple[str, ...], None] = {}
    chain: list[str] = []
    for step in dis.get_instructions(code):
        # Up to Python 3.11, a method is loaded by LOAD_METHOD, later by LOAD_ATTR.
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(step.argval))
            continue
        if chain:
            chains[tuple(chain)] = None
        chain = [str(step.argval)] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    # The code of inner functions, lambdas and classes is a constant of the code around it.
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            chains.update(dict.fromkeys(chains_in(constant)))
    return tuple(chains)


@functools.cache
def globals_assigned_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that code assigns."""
    inside = [name for item in code.co_consts if isinstance(item, types.CodeType) for name in globals_assigned_in(item)]
    own = [str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"]
    return tuple(dict.fromkeys([*own, *inside]))


@functools.cache
def words_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of all globals and attributes in code, and its texts, such as that of ``getattr(x, "name")``."""
    words = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            words |= words_in(constant)
        elif isinstance(constant, str):
            words.add(constant)
        # The compiler folds ``for name in ("scale", "shift")`` into one constant.
        elif isinstance(constant, (tuple, frozenset)):
            words.update(item for item in constant if isinstance(item, str))
    return frozenset(words)
