"""PyTorch modules under a worker: on the CPU for real, on CUDA where there is one, else on its stand-in."""

from __future__ import annotations

import copy
import struct
from hashlib import sha256

import cuda_stand_in as stand_in
import numpy as np
import pytest
from worker_support import CODEC, Running, ask_for_an_average, stepped

import flodl_fast as ff

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")
from flodl_fast import torch as module  # noqa: E402

f32 = np.float32
HALF = [torch.float16, torch.bfloat16]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; the stand-in's tests run instead")


class Net(torch.nn.Module):
    """Tied and transposed parameters, a frozen one, buffers of two dtypes, a scalar."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(3, 4)
        self.last.weight = self.first.weight
        self.slanted = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)


NAMES = ["slanted", "scale", "first.weight", "first.bias", "norm.weight", "norm.bias", "last.bias"]


def values(tensors):
    return [t.detach().float().cpu().numpy().copy() for t in tensors]


def frame(arrays, weight):
    """What another rank gives to a round."""
    return ff.RoundFrame([a * f32(weight) for a in arrays], weight=weight)


def counts(*numbers):
    return ff.RoundFrame([np.array(numbers, f32)], ff.RoundKind.CONTROL)


def averaged(coordinator, model, params, buffers, others, other_buffers, **options):
    """An average of two ranks, ours after 3 steps and the other after 1; what we sent, and the SyncAck."""
    with coordinator.serving(model, world=2, **options) as worker:
        stepped(coordinator, worker, 3)
        rounds = [[counts(0, 1)], [frame(others, 1.0)]] + ([[frame(other_buffers, 1.0)]] if other_buffers else [])
        ack, sent = ask_for_an_average(coordinator, worker, rounds)
    assert [a.tobytes() for a in sent[1].tensors] == [(a * f32(3)).tobytes() for a in params]
    return ack, sent


def mean(mine, theirs, weights=(3.0, 1.0)):
    """The crate's arithmetic."""
    total = f32(1.0 / sum(weights))
    return [(a * f32(weights[0]) + b * f32(weights[1])) * total for a, b in zip(mine, theirs, strict=True)]


def test_a_module_is_averaged_in_place(coordinator):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=0.1)
    net.norm(net.first(torch.randn(8, 3))).square().sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    held = [(p, p.data_ptr(), p.stride(), p.requires_grad, p.grad) for p in net.parameters()]
    model = module.Model(net)
    assert [n for n, _ in net.named_parameters()] == NAMES
    assert (len(model.params), len(model.buffers)) == (7, 2)  # the tied weight once; num_batches_tracked is int64
    params, buffers = values(net.parameters()), values([net.norm.running_mean, net.norm.running_var])
    others, other_buffers = [a + f32(1) for a in params], [a * f32(2) for a in buffers]
    averaged(coordinator, model, params, buffers, others, other_buffers)
    for got, expected in zip(values(net.parameters()), mean(params, others), strict=True):
        assert got.tobytes() == expected.tobytes()
    assert net.norm.running_var.numpy().tobytes() == mean(buffers, other_buffers, (1.0, 1.0))[1].tobytes()
    assert int(net.norm.num_batches_tracked) == 1
    assert net.last.weight is net.first.weight
    for p, (same, address, strides, grad_wanted, grad) in zip(net.parameters(), held, strict=True):
        assert p is same
        assert (p.data_ptr(), p.stride(), p.requires_grad) == (address, strides, grad_wanted)
        assert p.grad is grad
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, entry in state["state"].items():
        assert all(torch.equal(torch.as_tensor(entry[n]), torch.as_tensor(after["state"][key][n])) for n in entry)


def test_cpu_float32_is_shared_and_nothing_else():
    net = Net()
    model = module.Model(net)
    for tensor, array in zip(net.parameters(), model.params.arrays, strict=True):
        assert tensor.data_ptr() == array.ctypes.data
    half = module.Model(Net().bfloat16(), widen=True)
    assert [a.dtype for a in half.params.arrays] == [np.float32] * 7
    assert len(half.buffers) == 0  # buffers of half precision stay local


def test_other_memory_is_noticed():
    net = torch.nn.Linear(2, 2)
    tensors = module.Model(net).params
    tensors.pull()
    net.weight.data = net.weight.data.clone()
    with pytest.raises(RuntimeError, match="params: tensor 0 has other memory than when the worker was made"):
        tensors.pull()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_travels_as_float32_where_asked(coordinator, dtype):
    net = torch.nn.Linear(5, 3).to(dtype)
    with pytest.raises(TypeError, match=r'parameter weight: expected float32, got b?float16; .*widen=True'):
        module.Model(net)
    with pytest.raises(TypeError, match="tensor 0: expected float32"):
        ff.Worker(net.parameters(), rank=0, world=1, codec=CODEC, data=("", 0), control=("", 0))
    params = values(net.parameters())
    others = [a + f32(0.5) for a in params]
    averaged(coordinator, module.Model(net, widen=True), params, [], others, [])
    for tensor, expected in zip(net.parameters(), mean(params, others), strict=True):
        assert tensor.dtype == dtype
        assert tensor.requires_grad
        assert torch.equal(tensor.detach(), torch.from_numpy(expected).to(dtype))


def test_a_norm_of_half_precision():
    net = torch.nn.Linear(300, 200, bias=False).half()
    torch.nn.init.constant_(net.weight, 60.0)  # its squares are beyond float16
    assert module.Model(net, widen=True).params.norm() == pytest.approx(60 * 60000**0.5)


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float64, "parameter weight: expected float32, got float64$"), (torch.complex64, "got complex64$")],
    ids=str,
)
def test_other_dtypes_are_refused(dtype, error):
    with pytest.raises(TypeError, match=error):
        module.Model(torch.nn.Linear(2, 2, dtype=dtype), widen=True)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_view_of_a_parameter_is_refused(kind):
    net = torch.nn.Linear(3, 4)
    view = net.weight.data.t()[1:]
    if kind == "parameter":
        net.view = torch.nn.Parameter(view)
    else:
        net.register_buffer("view", view)
    with pytest.raises(ValueError, match=r"params: tensor 0 and (params: tensor 2|buffers: tensor 0) share memory"):
        module.Model(net)


def test_what_cannot_be_asked():
    options = {"rank": 0, "world": 1, "codec": CODEC, "data": ("", 0), "control": ("", 0)}
    with pytest.raises(TypeError, match="buffers of its own"):
        ff.Worker(module.Model(torch.nn.Linear(2, 2)), buffers=[np.zeros(1, f32)], **options)
    with pytest.raises(ValueError, match="at least one parameter"):
        ff.Worker(module.Model(torch.nn.ReLU()), **options)


def test_the_signature_is_of_names_dtypes_and_shapes_as_declared():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2, dtype=torch.bfloat16), torch.nn.BatchNorm1d(2))
    entries = [
        (b"P", b"0.weight", 15, 2, 3), (b"P", b"0.bias", 15, 2), (b"P", b"1.weight", 6, 2), (b"P", b"1.bias", 6, 2),
        (b"B", b"1.running_mean", 6, 2), (b"B", b"1.running_var", 6, 2), (b"B", b"1.num_batches_tracked", 4),
    ]
    plain = b"".join(
        tag + name + b"\0" + struct.pack(f"<iI{len(dims)}q", code, len(dims), *dims)
        for tag, name, code, *dims in entries
    )
    assert module.Model(net, widen=True).sig == sha256(plain).digest()


def test_ranks_of_0_8_in_bfloat16():
    """Their signatures agree, since their modules do; bfloat16 values travel as they are."""

    def train(environment, bias):
        net = torch.nn.Linear(2, 1).bfloat16()
        torch.nn.init.constant_(net.weight, 1.0)
        torch.nn.init.constant_(net.bias, bias)
        model = module.Model(net, widen=True)
        options = {"environment": ff.Environment.read(environment), "bf16_wire": True, "formation": False}
        with ff.Worker.from_env(model, **options) as worker:
            for plan in worker.plans():
                for _ in plan.batches(1):
                    worker.step(0.5)
        return [p.tolist() for p in net.parameters()]

    with ff.LocalCluster(2, 2, 1, 1, revision="0.8") as cluster:
        ranks = [Running(train, cluster.environment(rank), bias) for rank, bias in enumerate((1.0, 2.0))]
        assert [rank.result() for rank in ranks] == [[[[1.0, 1.0]], [1.5]]] * 2


def test_the_repr():
    assert repr(module.Model(Net())) == "flodl_fast.torch.Model(7 parameters, 2 buffers, 172 bytes)"


# -------------------------------------------------------------------------------------------------------------- CUDA


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA: its kernels wait in the current stream."""

    is_cuda = True
    device = torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def work():
            with torch._C.DisableTorchFunction():
                return function(*args, **(kwargs or {}))

        if function in (torch.Tensor.copy_, torch.Tensor.add_):
            assert function is not torch.Tensor.copy_ or kwargs == {"non_blocking": True}
            stand_in.Stream.current.give(function.__name__, work)
            return args[0]
        stand_in.Stream.current.finish()
        return work()


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in in the place of torch.cuda; pinned memory begins as NaN."""
    caller = stand_in.restart()
    monkeypatch.setattr(torch.cuda, "Stream", stand_in.Stream)
    monkeypatch.setattr(torch.cuda, "Event", stand_in.Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stand_in.Stream.current)
    empty = torch.empty

    def pinned(*shape, pin_memory=False, **keywords):
        assert pin_memory
        stand_in.CALLS.append(("host", "pin"))
        return empty(*shape, **keywords).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", pinned)
    module._cuda.cache_clear()
    yield caller
    module._cuda.cache_clear()


def on_cuda(*shape):
    return torch.ones(*shape).as_subclass(OnCuda)


def test_order_of_copies_and_kernels(cuda):
    mine = [on_cuda(2, 3), on_cuda(4)]
    tensors = module.Tensors("params", mine)

    def read(tensor):
        cuda.finish()
        return tensor.as_subclass(torch.Tensor).numpy()

    stand_in.check(tensors, mine, lambda tensor: tensor.add_(1), read)
    assert stand_in.CALLS.count(("host", "pin")) == 2  # once each, whatever the number of averages


def test_copies_run_beside_the_count_round(cuda, coordinator, monkeypatch):
    """They begin before the coordinator is told, are waited for once all ranks have answered, and end in no wait."""
    gather = ff.DataChannel.gather
    monkeypatch.setattr(
        ff.DataChannel, "gather", lambda *args: (stand_in.CALLS.append(("host", "gather")), gather(*args))[1]
    )
    mine = [on_cuda(3)]
    averaged(coordinator, mine, [np.ones(3, f32)], [], [np.full(3, 5, f32)], [])
    assert stand_in.CALLS[1:] == [  # after the pinned memory
        ("caller", "record"), ("side", "wait"), ("side", "copy_"), ("side", "record"),
        ("host", "gather"), ("host", "synchronize"),
        ("caller", "record"), ("side", "wait"), ("side", "copy_"), ("side", "record"), ("caller", "wait"),
    ]
    cuda.finish()
    assert mine[0].as_subclass(torch.Tensor).tolist() == [2, 2, 2]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_module_on_a_gpu(coordinator, dtype):
    net = Net().cuda().to(dtype)
    params, buffers = values(net.parameters()), []
    others = [a + f32(1) for a in params]
    if dtype == torch.float32:
        buffers = values([net.norm.running_mean, net.norm.running_var])
    model = module.Model(net, widen=True)
    assert all(slot.host.is_pinned() for _, slot in model.params._slots.values())
    assert model.params.norm() == pytest.approx(np.sqrt(sum((a.astype(float) ** 2).sum() for a in params)), rel=1e-5)
    averaged(coordinator, model, params, buffers, others, buffers)
    for tensor, expected in zip(net.parameters(), mean(params, others), strict=True):
        assert torch.equal(tensor.detach().cpu(), torch.from_numpy(np.asarray(expected)).to(dtype))
