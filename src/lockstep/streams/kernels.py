"""Make torch's random CPU kernels draw from the calling thread's stream.

Every random CPU function of torch, whether or not it takes a generator, ends in a few kernels that
do (28 in torch 2.13). A call of such a kernel passes torch's dispatcher, whose key
``BackendSelect`` comes right before the key of the device and is unused by them. There the
generator is filled in, and the call goes on to the kernel it was meant for: autograd, autocast, function
transforms and other people's kernels stay as they are, and the kernel runs without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.streams.state import default_addresses
from lockstep.streams.thread import THREAD

_HOOK = "BackendSelect"


@dataclass(frozen=True, slots=True)
class RandomKernel:
    """One operator with a random CPU kernel.

    Args:
        operator: Its name, as in ``"bernoulli_"``.
        overload: The name of the overload, as in ``"float"``; empty for the unnamed one.
        position: Where its argument ``generator`` stands.
    """

    operator: str
    overload: str
    position: int

    @property
    def name(self) -> str:
        """The name under which a kernel is registered, as in ``"bernoulli_.float"``."""
        return f"{self.operator}.{self.overload}" if self.overload else self.operator

    @property
    def op(self) -> torch._ops.OpOverload[..., object]:
        """The operator itself."""
        packet = getattr(torch.ops.aten, self.operator)
        overload: torch._ops.OpOverload[..., object] = getattr(packet, self.overload or "default")
        return overload


def random_kernels() -> list[RandomKernel]:
    """List the operators of this torch that have a CPU kernel and take a generator.

    >>> "bernoulli_.float" in [kernel.name for kernel in random_kernels()]
    True
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")  # noqa: SLF001 - no public way
    names = [name.removeprefix("aten::") for name in registered if name.startswith("aten::")]
    kernels = [_random_kernel(name) for name in sorted(names)]
    return [kernel for kernel in kernels if kernel is not None]


def redirect(kernels: Iterable[RandomKernel]) -> torch.library.Library:
    """Let these operators draw from the calling thread's stream, until the library is given to `restore`.

    Raises:
        RuntimeError: Somebody else already stands where the calls are to be met; nothing has changed.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's gap
    try:
        for kernel in kernels:
            _hook(library, kernel)
    except BaseException:
        restore(library)
        raise
    return library


def restore(library: torch.library.Library) -> None:
    """Let the operators that `redirect` changed be as they were."""
    # Dropping the library does the same, but only once nobody refers to it.
    library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001


def _random_kernel(name: str) -> RandomKernel | None:
    operator, _, overload = name.partition(".")
    schema = torch._C._get_schema(f"aten::{operator}", overload)  # noqa: SLF001 - no public way
    positions = [place for place, argument in enumerate(schema.arguments) if "Generator" in str(argument.type)]
    return RandomKernel(operator, overload, positions[0]) if positions else None


def _hook(library: torch.library.Library, kernel: RandomKernel) -> None:
    name, key = f"aten::{kernel.name}", _HOOK
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):  # noqa: SLF001 - no public way
        raise RuntimeError(f"another library has registered {name} for {key}")
    call = _with_generator(kernel)
    library.impl(kernel.name, call, key, with_keyset=True)  # type: ignore[no-untyped-call]  # torch's gap


def _with_generator(kernel: RandomKernel) -> Callable[..., Any]:
    """Make the function that fills in the thread's generator and passes the call on."""
    position = kernel.position
    redispatch = kernel.op.redispatch
    below = torch._C._dispatch_keyset_full_after(torch.DispatchKey.BackendSelect)  # noqa: SLF001 - no public way
    cpu = torch.DispatchKey.CPU
    default, addresses = torch.default_generator, default_addresses()

    # All random operations of the process go through here; each line costs every one of them.
    def call(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        stream = THREAD.generator
        positional = len(args) > position
        given = args[position] if positional else kwargs.get("generator")
        if given is None:
            chosen = stream if stream is not None and keyset.has(cpu) else None
        elif given._cdata in addresses:  # noqa: SLF001 - the only identity it has
            chosen = default if stream is None else stream
        else:
            chosen = given
        if positional:
            args = (*args[:position], chosen, *args[position + 1 :])
        else:
            kwargs["generator"] = chosen
        return redispatch(keyset & below, *args, **kwargs)

    return call
