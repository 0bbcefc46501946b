"""Redirect the random CPU kernels of torch to the stream of the calling thread.

Every random CPU function of torch, whether or not it accepts a generator, ends in one of a few kernels that do (28 in
torch 2.13). A call of such a kernel passes through the dispatcher of torch, in which the key ``BackendSelect`` comes
directly before the key of the device and is not used by these operators. A function registered there fills in the
generator and passes the call on to its original kernel. Autograd, autocast, function transforms and kernels of other
libraries therefore work as before, and the kernel still runs without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.streams.state import default_addresses
from lockstep.streams.thread import THREAD_STREAMS

_DISPATCH_KEY = "BackendSelect"


@dataclass(frozen=True, slots=True)
class RandomKernel:
    """An operator with a random CPU kernel.

    Args:
        operator: The name of the operator, such as ``"bernoulli_"``.
        overload: The name of the overload, such as ``"float"``, which is empty for the unnamed overload.
        position: The index of the argument ``generator``.
    """

    operator: str
    overload: str
    position: int

    @property
    def name(self) -> str:
        """The name under which a kernel is registered, such as ``"bernoulli_.float"``."""
        return f"{self.operator}.{self.overload}" if self.overload else self.operator

    @property
    def op(self) -> torch._ops.OpOverload[..., object]:
        """The operator itself."""
        packet = getattr(torch.ops.aten, self.operator)
        overload: torch._ops.OpOverload[..., object] = getattr(packet, self.overload or "default")
        return overload


def random_kernels() -> list[RandomKernel]:
    """List the operators of the installed torch that have a CPU kernel and accept a generator.

    >>> "bernoulli_.float" in [kernel.name for kernel in random_kernels()]
    True
    """
    # Listed from the dispatcher instead of written down, so that no kernel of another version of torch is missed.
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")  # noqa: SLF001 - no public way
    names = [name.removeprefix("aten::") for name in registered if name.startswith("aten::")]
    kernels = [_random_kernel(name) for name in sorted(names)]
    return [kernel for kernel in kernels if kernel is not None]


def redirect(kernels: Iterable[RandomKernel]) -> torch.library.Library:
    """Redirect operators to the stream of the calling thread until the library is passed to `restore`.

    Args:
        kernels: The operators to redirect.

    Returns:
        The library that holds the registrations.

    Raises:
        RuntimeError: If another library has registered one of the operators for the same dispatch key. Nothing has
            changed in that case.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's gap
    try:
        for kernel in kernels:
            _register(library, kernel)
    except BaseException:
        restore(library)
        raise
    return library


def restore(library: torch.library.Library) -> None:
    """Undo what `redirect` did.

    Args:
        library: The library that `redirect` returned.
    """
    # Deleting the library has the same effect, but only after the last reference to it is gone.
    library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001


def _random_kernel(name: str) -> RandomKernel | None:
    operator, _, overload = name.partition(".")
    schema = torch._C._get_schema(f"aten::{operator}", overload)  # noqa: SLF001 - no public way
    positions = [index for index, argument in enumerate(schema.arguments) if "Generator" in str(argument.type)]
    return RandomKernel(operator, overload, positions[0]) if positions else None


def _register(library: torch.library.Library, kernel: RandomKernel) -> None:
    name, key = f"aten::{kernel.name}", _DISPATCH_KEY
    # A second registration would replace the first one without an error and break the other library.
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):  # noqa: SLF001 - no public way
        raise RuntimeError(f"another library has registered {name} for {key}")
    call = _with_generator(kernel)
    library.impl(kernel.name, call, key, with_keyset=True)  # type: ignore[no-untyped-call]  # torch's gap


def _with_generator(kernel: RandomKernel) -> Callable[..., Any]:
    """Return the function that fills in the generator of the thread and passes the call on."""
    position = kernel.position
    redispatch = kernel.op.redispatch
    # All keys below `BackendSelect`, so that redispatching goes on where the call was intercepted.
    below = torch._C._dispatch_keyset_full_after(torch.DispatchKey.BackendSelect)  # noqa: SLF001 - no public way
    cpu = torch.DispatchKey.CPU
    default, addresses = torch.default_generator, default_addresses()

    # Every random operation of the process calls this function, so each line of it has a cost.
    def call(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        stream = THREAD_STREAMS.generator
        positional = len(args) > position
        given = args[position] if positional else kwargs.get("generator")
        if given is None:
            # Calls for other devices also pass here, and a CPU generator would be an error there.
            chosen = stream if stream is not None and keyset.has(cpu) else None
        elif given._cdata in addresses:  # noqa: SLF001 - the only identity it has
            # An explicit default generator means "the generator in effect here", as modules and `torch.random` pass it.
            # Any other generator was chosen by the user.
            chosen = default if stream is None else stream
        else:
            chosen = given
        if positional:
            args = (*args[:position], chosen, *args[position + 1 :])
        else:
            kwargs["generator"] = chosen
        return redispatch(keyset & below, *args, **kwargs)

    return call
