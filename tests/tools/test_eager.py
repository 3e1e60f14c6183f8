"""Blocks without compiled modules, in several threads."""

from contextlib import ExitStack

import torch

from torchtitan.tools.eager import uncompiled


def test_overlapping_blocks_leave_compilation_as_it_was():
    """As those of two engines in two threads, of which the first to begin is the first to end."""
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    torch._dynamo.reset()
    doubled = torch.compile(lambda x: 2 * x, backend=backend)
    first, second = ExitStack(), ExitStack()
    first.enter_context(uncompiled())
    second.enter_context(uncompiled())
    first.close()
    assert torch.equal(doubled(torch.ones(2)), 2 * torch.ones(2)) and not calls
    second.close()
    doubled(torch.ones(2))
    assert len(calls) == 1
    torch._dynamo.reset()
