"""Two processes, data-parallel over gloo: the same gradients as one process, and no parameter unused."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import neurocoder as nc
from neurocoder.modular.training import ViterbiEM, classification

pytestmark = pytest.mark.slow


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nc.Conv2d(2, 4, 3, slots=5, heads=2, residual=True),
        nn.Flatten(),
        nc.Linear(64, 8, slots=5, steps=3, heads=2, least_used=2, residual=True),
        nn.ReLU(),
        nc.Linear(8, 3, slots=5, heads=4),
    ).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 2, 6, 6, generator=generator).double(), torch.randint(3, (8,), generator=generator)


def worker(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build()
    model.load_state_dict(load_file(f"{folder}/start.safetensors"))  # threads change a QR in its last bits
    model = DistributedDataParallel(model)  # find_unused_parameters=False: an unused one would raise in step 2
    x, y = data()
    mine = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):
        model.zero_grad()
        with nc.trace(model) as seen:
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
    assert list(seen) == ["0", "2", "4"]
    save_file({name: p.grad for name, p in model.module.named_parameters()}, f"{folder}/{rank}.safetensors")
    dist.destroy_process_group()


def test_two_processes_have_the_gradients_of_one(tmp_path):
    model = build()
    save_file(model.state_dict(), tmp_path / "start.safetensors")
    mp.spawn(worker, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    x, y = data()
    nn.functional.cross_entropy(model(x), y).backward()
    for rank in range(2):
        grads = load_file(tmp_path / f"{rank}.safetensors")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-12)


def routed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nc.modular.Conv2d(2, 4, 3, modules=6),
        nn.Flatten(),
        nc.peers.MixtureOfExperts(64, 8, experts=9),
        nc.peers.StoredProgramMemory(8, 8, programs=3),
        nc.peers.FiLM(8, 8),
        nc.peers.HyperLinear(8, 8),
        nc.peers.LowRank(8, 8, rank=2),
        nc.modular.Linear(8, 3, modules=5, choices=2),
    ).double()
    nn.init.normal_(model[2].gate, std=1e6)  # beside which the noise of training, another in each process, is nothing
    return model


def routed_worker(rank: int, store: str, folder: str) -> None:
    """Experts and modules without a single row in a process must not stop it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = routed()
    em = ViterbiEM(DistributedDataParallel(model), classification, size=8, samples=3)
    x, y = data()
    torch.manual_seed(rank)
    mine = torch.arange(5 if rank == 0 else 3) + 5 * rank  # batches of different sizes
    for _ in range(2):
        model.zero_grad()
        em.expect(x[mine], y[mine], mine)
        em.loss(x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4], torch.arange(4) + 4 * rank).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    save_file(grads | em.state_dict(), f"{folder}/{rank}.safetensors")
    dist.destroy_process_group()


def test_routed_layers_and_em_on_two_processes(tmp_path):
    mp.spawn(routed_worker, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)
    model = routed()
    em = ViterbiEM(model, classification, size=8)
    em.load_state_dict({name: first[name] for name in ("choices", "modules")})
    x, y = data()
    em.loss(x, y, torch.arange(8)).backward()
    for name, parameter in model.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(first[name], wanted, rtol=1e-9, atol=1e-12)


def sparse() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nc.Linear(6, 8, slots=40, heads=2, top_k=2, sparse=True),
        nn.ReLU(),
        nc.Linear(8, 3, slots=36, key_dim=4, heads=2, top_k=1, one_choice=True, product_keys=True, sparse=True),
    ).double()


def sparse_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator).double(), torch.randint(3, (8,), generator=generator)


def sparse_steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    rest, rows = nc.split_parameters(model)
    optimisers = [torch.optim.Adam(rest, 0.01), nc.SparseAdam(rows, 0.01)]
    for _ in range(3):
        for optimiser in optimisers:
            optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for optimiser in optimisers:
            optimiser.step()


def sparse_worker(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = sparse()
    model.load_state_dict(load_file(f"{folder}/start.safetensors"))
    x, y = (tensor[4 * rank : 4 * rank + 4] for tensor in sparse_data())
    sparse_steps(DistributedDataParallel(model), x, y)
    assert model[0].memory.left.grad.is_sparse
    save_file(model.state_dict(), f"{folder}/{rank}.safetensors")
    dist.destroy_process_group()


def test_sparse_gradients_on_two_processes_are_those_of_one(tmp_path):
    model = sparse()
    save_file(model.state_dict(), tmp_path / "start.safetensors")
    mp.spawn(sparse_worker, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    sparse_steps(model, *sparse_data())
    for rank in range(2):
        weights = load_file(tmp_path / f"{rank}.safetensors")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-9)
