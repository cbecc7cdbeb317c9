"""A simulated CUDA device for tests: thinwire as it is, real autograd, DDP, lanes and Gloo, and no GPU.

Tensors "on CUDA" are tensors of the CPU in memory that a simulated caching allocator makes. Their ``device`` says
``cuda:0``; ``torch.cuda`` has simulated streams and events; futures take events as torch's do. Each operation runs at
once and is booked on its stream. Reported are

- races: two accesses to the same bytes, one a write, that no stream, event or wait of the host orders; also between
  pinned memory and the host, and memory that was freed while a stream used it (no ``record_stream``);
- errors: tensors of two devices in one operation, a context on a device of another rank, work in a graph's capture,
  NCCL from two threads;
- waits of the host for the device, by thread, kind and line; and launches, by stream.

In one process::

    with simulated() as world:
        gradient = torch.ones(5, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            doubled = gradient * 2          # a race: nothing makes it wait for the current stream
        assert world.races
        assert peek(doubled).sum() == 10    # the values, without booking a copy
        world.waits, world.launches, world.errors

Whole steps of `thinwire.attach` on ranks that are processes: add a `Scenario` to `SCENARIOS` in scenarios.py, or
run one of your own in a test of yours::

    scenario = Scenario("mine", tables=(600, 40), layers=(8,), sparse=True, scheme="agsparse", ddp={})
    for outcome in run_ranks(run_one, scenario, world_size=2):
        report: Report = outcome.value
        assert report.found == [] and report.waits == {}

``simulated(own=(1,))`` lets the process use cuda:1 alone. ``capturing()`` is a time in which the current stream is
captured. Without Triton, or without TRITON_INTERPRET=1, the reference kernels run on simulated tensors; with both
the Triton kernels do. Nodes of backward run on the streams of their forward, as autograd's engine has it (`engine`),
and messages of the lane order what their ends do (`network`). Counted besides: pieces that NCCL would copy byte by
byte, pinned memory that is allocated in each step, copies that it has no room for.

What is not simulated: the thread of autograd that a device has (backward runs on the caller's), and kernels that run
late: bits are those of the order in which the host issued the work, except for copies. What NumPy does to pinned memory
counts as one read, when ``numpy()`` is called; an array that begins inside of it is not seen. Of FSDP2 whole
parameters are emptied and filled in place: nobody else gets their memory in between.
"""

from simgpu.device import Event, Stream, World, capturing
from simgpu.torch_semantics import has_interpreter, peek, simulated

__all__ = ["Event", "Stream", "World", "capturing", "has_interpreter", "peek", "simulated"]
