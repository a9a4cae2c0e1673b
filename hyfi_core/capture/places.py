"""Locations in the user's code, for messages: module, file and line."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch
from torch import nn

from hyfi_core.memory_overlap import overlapping

_CORE = Path(__file__).parent.parent
_MODELS = f"{_CORE / 'models'}/"
# Code without a file has a name such as ``<string>`` or ``<frozen importlib>``.
_NOT_USERS = (f"{Path(torch.__file__).parent}/", f"{_CORE}/", "<")
_PYTHON = f"{Path(linecache.__file__).parent}/"
INSTALLED = "/site-packages/"


def calling_line() -> str:
    """Return the innermost line of the user's code in the current stack, ``FILE:LINE (source)``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return "an unknown line" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def traced_line(stack: str) -> str:
    """Return the innermost line of the user's code in the text of a stack, "" where there is none."""
    places = [(file, int(number)) for file, number in re.findall(r'File "(.+?)", line (\d+)', stack)]
    users = [frame for frame in places if is_users_file(frame[0])]
    return _line(*users[-1]) if users else ""


def explained(error: Exception, model: nn.Module) -> str:
    """Return one line that says what failed during tracing, where, and what would help."""
    # PyTorch raises such an AssertionError for a graph that changes one of two inputs which share memory.
    if isinstance(error, AssertionError) and "GraphModule" in str(error):
        for first, second in overlapping({**dict(model.named_parameters()), **dict(model.named_buffers())}):
            return (
                f"{first!r} and {second!r} are different tensors in the same memory, and the forward changes "
                f"one; register only one of them, and compute the other from it"
            )
    line, path = _failing_place(error, model)
    module = dict(model.named_modules()).get(path or "")
    where_in_model = f"in {path} ({type(module).__name__}), " if path else ""
    where = where_in_model + (f"at {line}" if line else "")
    return f"{where.removesuffix(', ')}: {_described(error)}".removeprefix(": ")


def _described(error: Exception) -> str:
    """Return why a forward failed; for common errors, in terms of what the user can change."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    kind = type(error).__name__
    missing = re.search(r"missing (?:a|\d+) required (?:[a-z-]+ )?arguments?: (.*)", message)
    if isinstance(error, TypeError) and missing:
        return (
            f"the forward requires arguments besides the image: {missing[1]}; give them defaults, or wrap the model "
            f"in a module that passes them"
        )
    # Which class of error this is differs between versions of PyTorch and between operators.
    if "DataDependent" in kind or "data-dependent" in message or "_local_scalar_dense" in message:
        return (
            "it reads a value from a tensor (a branch, a loop, .item(), float(), a boolean mask), and this value "
            "differs from image to image; use tensor operations such as torch.where instead"
        )
    return message


def _failing_place(error: BaseException, model: nn.Module) -> tuple[str | None, str | None]:
    """Return (line of the user's code, path of the module) that raised an error, None where unknown."""
    names = {id(module): name for name, module in model.named_modules()}
    line = path = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        # The traceback leads from the caller inwards: the last line and module are nearest to the error.
        path = names.get(id(frame.f_locals.get("self"))) or path
        if is_users(frame.f_code):
            line = _line(frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return line, path


def is_users(code: CodeType) -> bool:
    """Whether code is the user's, or of a package of networks: not PyTorch's, Python's or the engine's."""
    return is_users_file(code.co_filename)


def is_users_file(name: str) -> bool:
    """Whether a file is the user's, or of a package of networks."""
    # The built-in models are in the core's folder, but count as a user's.
    if name.startswith(_MODELS):
        return True
    # Installed packages are in a subfolder of Python's own.
    of_python = name.startswith(_PYTHON) and INSTALLED not in name
    return not of_python and not name.startswith(_NOT_USERS)


def _line(file: str, number: int) -> str:
    source = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f" ({source})" if source else "")
