"""References of the outer loops: all replicas in one process, in numpy, each written from its paper.

Nothing here is shared with thinwire. Where a paper averages parameters and thinwire differences, the reference averages
parameters. All numbers are float64; steps are counted from 1, so that "after step t" is after the t-th inner step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
Params = dict[str, Array]


@dataclass
class Sgd:
    """SGD as ``torch.optim.SGD`` has it: ``b = m b + g``, ``x -= lr b``; with Nesterov ``x -= lr (g + m b)``."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    buffers: Params = field(default_factory=dict)

    def step(self, params: Params, gradients: Mapping[str, Array]) -> None:
        for name, gradient in gradients.items():
            direction = gradient
            if self.momentum:
                kept = self.buffers.get(name)
                buffer = gradient.copy() if kept is None else self.momentum * kept + gradient
                self.buffers[name] = buffer
                direction = gradient + self.momentum * buffer if self.nesterov else buffer
            params[name] = params[name] - self.lr * direction


@dataclass
class Regression:
    """A network of one hidden layer, fitted to random targets: data of its own for each rank and step.

    Args:
        sizes: of the input, the hidden layer and the output.
    """

    sizes: tuple[int, int, int] = (6, 5, 3)
    batch: int = 7
    seed: int = 0

    def initial(self) -> Params:
        data = np.random.default_rng(self.seed)
        inputs, hidden, outputs = self.sizes
        return {
            "0.weight": data.normal(size=(hidden, inputs)),
            "0.bias": data.normal(size=hidden),
            "2.weight": data.normal(size=(outputs, hidden)),
            "2.bias": data.normal(size=outputs),
        }

    def data(self, rank: int, step: int) -> tuple[Array, Array]:
        """Return the inputs and targets of a rank in a step; the targets of ranks differ in the mean."""
        data = np.random.default_rng((self.seed, rank, step))
        return data.normal(size=(self.batch, self.sizes[0])), rank + data.normal(size=(self.batch, self.sizes[2]))

    def gradient(self, rank: int, step: int, params: Params) -> Params:
        """Return the gradient of the mean squared error (``torch.nn.functional.mse_loss``)."""
        inputs, targets = self.data(rank, step)
        hidden = np.tanh(inputs @ params["0.weight"].T + params["0.bias"])
        output = hidden @ params["2.weight"].T + params["2.bias"]
        at_output = 2.0 * (output - targets) / targets.size
        at_hidden = (at_output @ params["2.weight"]) * (1.0 - hidden**2)
        return {
            "0.weight": at_hidden.T @ inputs,
            "0.bias": at_hidden.sum(0),
            "2.weight": at_output.T @ hidden,
            "2.bias": at_output.sum(0),
        }


@dataclass
class Replica:
    """A rank: its parameters, its inner optimizer, and how many inner steps it has made."""

    problem: Regression
    rank: int
    inner: Sgd
    params: Params = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.params = self.problem.initial()

    def step(self) -> None:
        self.count += 1
        self.inner.step(self.params, self.problem.gradient(self.rank, self.count, self.params))


def replicas_of(problem: Regression, ranks: int, inner: Callable[[], Sgd]) -> list[Replica]:
    return [Replica(problem, rank, inner()) for rank in range(ranks)]


def mean(entries: Sequence[Params], weights: Sequence[float]) -> Params:
    """Return the mean of parameters or differences, weighted by the inner steps that each stands for.

    The papers have equal numbers of steps, hence the plain mean.
    """
    total = sum(weights)
    return {
        name: sum(weight / total * entry[name] for weight, entry in zip(weights, entries, strict=True))
        for name in entries[0]
    }


def local_sgd(
    problem: Regression, ranks: int, steps: int, inner: Callable[[], Sgd], every: int, start_step: int = 0
) -> list[Params]:
    """Return the parameters of each rank after local SGD; post-local SGD with a ``start_step``.

    Stich 2019 (arXiv 1805.09767), algorithm 1: every H steps each worker takes the mean of all workers' parameters.
    Lin et al. 2020 (arXiv 1808.07217), section 3: the mean is taken after every step up to t', and every H steps
    after that.
    """
    replicas = replicas_of(problem, ranks, inner)
    for step in range(1, steps + 1):
        for replica in replicas:
            replica.step()
        if step <= start_step or (step - start_step) % every == 0:
            common = mean([replica.params for replica in replicas], [1] * ranks)
            for replica in replicas:
                replica.params = dict(common)
    return [replica.params for replica in replicas]


def diloco(
    problem: Regression, ranks: int, steps: int, inner: Callable[[], Sgd], outer: Sgd, every: int
) -> list[Params]:
    """Return the parameters of each rank after DiLoCo.

    Douillard et al. 2023 (arXiv 2311.08105), algorithm 1: after H inner steps the outer gradient is
    ``theta(t-1) - theta_i(t)``, averaged over workers; the outer optimizer (SGD with Nesterov momentum) steps
    ``theta(t-1)`` with it; every worker goes on from ``theta(t)``, with its inner optimizer as it was.
    """
    replicas = replicas_of(problem, ranks, inner)
    theta = problem.initial()
    for _ in range(steps // every):
        for replica in replicas:
            for _ in range(every):
                replica.step()
        outer_gradients = [{name: theta[name] - replica.params[name] for name in theta} for replica in replicas]
        outer.step(theta, mean(outer_gradients, [1] * ranks))
        for replica in replicas:
            replica.params = dict(theta)
    for replica in replicas:
        for _ in range(steps % every):
            replica.step()
    return [replica.params for replica in replicas]


def streaming_diloco(
    problem: Regression,
    ranks: int,
    steps: int,
    inner: Callable[[], Sgd],
    outer: Callable[[], Sgd],
    every: int,
    fragments: Sequence[Sequence[str]],
    delay: int,
    alpha: float,
) -> list[Params]:
    """Return the parameters of each rank after Streaming DiLoCo.

    Douillard et al. 2025 (arXiv 2501.18512), algorithm 2. The outer gradient of fragment p is taken after the steps t
    with ``(t + t_p) mod H = 0`` and sent while training goes on. After step ``t + tau`` the outer optimizer of the
    fragment steps its global parameters, and each worker mixes:
    ``theta_m,p = alpha theta_m,p + (1 - alpha) theta_p``. The offsets t_p are spread over H evenly: here fragment
    number p is sent after its first ``(p + 1) H / F`` steps, rounded up, and every H steps from then on.

    Args:
        fragments: the names of the parameters of each.
        delay: tau.
        alpha: what a worker keeps of its own parameters; thinwire's ``mix`` is ``1 - alpha``.
    """
    replicas = replicas_of(problem, ranks, inner)
    theta = problem.initial()
    optimizers = [outer() for _ in fragments]
    arrivals: dict[int, list[tuple[int, Params]]] = {}
    for step in range(1, steps + 1):
        for replica in replicas:
            replica.step()
        for place, names in enumerate(fragments):
            first = -(-(place + 1) * every // len(fragments))
            if step >= first and (step - first) % every == 0:
                sent = [{name: theta[name] - replica.params[name] for name in names} for replica in replicas]
                arrivals.setdefault(step + delay, []).append((place, mean(sent, [1] * ranks)))
        for place, outer_gradient in arrivals.pop(step, []):
            optimizers[place].step(theta, outer_gradient)
            for replica in replicas:
                for name in fragments[place]:
                    replica.params[name] = alpha * replica.params[name] + (1.0 - alpha) * theta[name]
    return [replica.params for replica in replicas]


def top_k(values: Array, k: int) -> Array:
    """Return the values with all but the k largest by magnitude set to zero."""
    flat = np.abs(values).ravel()
    kept = np.zeros(flat.size, dtype=bool)
    kept[np.argsort(-flat, kind="stable")[:k]] = True
    return np.where(kept.reshape(values.shape), values, 0.0)


def sparse_loco(
    problem: Regression,
    ranks: int,
    steps: int,
    inner: Callable[[], Sgd],
    every: int,
    lr: float,
    decay: float,
    k: Mapping[str, int],
) -> list[Params]:
    """Return the parameters of each rank after SparseLoCo.

    Sarfi et al. 2025 (arXiv 2508.15706), algorithm 1: ``a = beta e + (theta - theta_m)``; ``TopK(a)`` is sent, and
    ``e = a - TopK(a)`` stays; ``theta -= lr mean(TopK(a))``, without outer momentum; all workers go on from theta.
    Where we deviate: the k largest are those of a whole tensor, not of chunks of 4096 elements, and the reference does
    not quantize what is sent, because random rounding cannot be compared.

    Args:
        k: for each parameter how many elements are sent; parameters without an entry are sent whole.
    """
    replicas = replicas_of(problem, ranks, inner)
    theta = problem.initial()
    errors = [{name: np.zeros_like(theta[name]) for name in k} for _ in replicas]
    for step in range(1, steps + 1):
        for replica in replicas:
            replica.step()
        if step % every:
            continue
        sent: list[Params] = []
        for replica, error in zip(replicas, errors, strict=True):
            payload = {name: theta[name] - replica.params[name] for name in theta}
            for name, count in k.items():
                corrected = decay * error[name] + payload[name]
                payload[name] = top_k(corrected, count)
                error[name] = corrected - payload[name]
            sent.append(payload)
        common = mean(sent, [1] * ranks)
        theta = {name: theta[name] - lr * common[name] for name in theta}
        for replica in replicas:
            replica.params = dict(theta)
    return [replica.params for replica in replicas]


@dataclass(frozen=True)
class ShadowRound:
    """When a round of the background meets each rank: read after step ``read[rank]``, mixed in after ``mixed[rank]``.

    Both count the inner steps of that rank; ranks differ in them as they differ in speed.
    """

    read: tuple[int, ...]
    mixed: tuple[int, ...]


UpdateCenter = Callable[[Params, Params], Params]  # (center, mean of replicas) -> the next center


def easgd(beta: float) -> UpdateCenter:
    """Return EASGD's update of the center: ``center + beta (mean - center)``.

    Zhang et al. 2015 (arXiv 1412.6651), equation 5 of synchronous EASGD with ``beta = p alpha`` of p workers.
    In ShadowSync (Zheng et al. 2020, arXiv 2003.03477, algorithm 2) each trainer meets the center alone, on parameter
    servers: ``center = (1 - alpha) center + alpha x_i``, then ``x_i = (1 - alpha) x_i + alpha center``. Where we
    deviate: there are no servers; all ranks meet the center at once by a collective, and each keeps a copy of it.
    """
    return lambda center, average: {name: center[name] + beta * (average[name] - center[name]) for name in center}


def model_averaging() -> UpdateCenter:
    """Return the update of ShadowSync's algorithm 3: the center is the mean of the replicas."""
    return lambda center, average: dict(average)


def bmuf(block_momentum: float, block_lr: float, nesterov: bool = False) -> UpdateCenter:
    """Return the update of block-wise model update filtering.

    Chen and Huo 2016 (ICASSP), equations 2 to 6: ``G = mean - W_g``; ``Delta = eta Delta + zeta G``;
    ``W = W + Delta``; the next blocks begin at ``W_g = W`` (classical), or at ``W + eta Delta`` (Nesterov).
    ShadowSync's algorithm 4 is this in the background; it leaves the momentum to the user.
    """
    delta: Params = {}
    at: Params = {}

    def update(center: Params, average: Params) -> Params:
        found: Params = {}
        for name in center:
            block_gradient = average[name] - center[name]
            delta[name] = block_momentum * delta.get(name, 0.0) + block_lr * block_gradient
            at[name] = at.get(name, center[name]) + delta[name]
            found[name] = at[name] + block_momentum * delta[name] if nesterov else at[name]
        return found

    return update


def shadow_sync(
    problem: Regression,
    ranks: int,
    steps: Sequence[int],
    inner: Callable[[], Sgd],
    update: UpdateCenter,
    alpha: float,
    rounds: Sequence[ShadowRound],
) -> tuple[list[Params], Params]:
    """Return the parameters of each rank and the center after ShadowSync, with rounds at given steps.

    arXiv 2003.03477, algorithms 2 to 4: the shadow thread reads ``x_i`` while training goes on, updates the center, and
    sets ``x_i = (1 - alpha) x_i + alpha center``. Where we deviate:

    - The paper's last line overwrites in part what training added to ``x_i`` since it was read, and races with it.
      Here ``x_i += alpha (center - x_i as it was read)``: what was added meanwhile stays whole, and without steps in
      between it is the paper's line.
    - Replicas are weighted by the inner steps that they made since they were read last; the paper's count alike. One
      that made none counts nothing, and is still pulled.

    Args:
        steps: how many inner steps each rank makes.
        alpha: how far replicas are pulled to the center; thinwire's ``mix``.
        rounds: in order. A round reads a rank with the correction of the one before, mixed in yet or not.
    """
    replicas = replicas_of(problem, ranks, inner)
    center = problem.initial()
    waiting: list[list[tuple[int, Params]]] = [[] for _ in replicas]  # corrections, with the step that mixes them in
    read_before = [0] * ranks

    def train_until(rank: int, count: int) -> None:
        replica = replicas[rank]
        while True:
            while waiting[rank] and waiting[rank][0][0] <= replica.count:
                _, correction = waiting[rank].pop(0)
                replica.params = {name: replica.params[name] + correction[name] for name in correction}
            if replica.count == count:
                return
            replica.step()

    for entry in rounds:
        seen: list[Params] = []
        for rank, replica in enumerate(replicas):
            train_until(rank, entry.read[rank])
            read = dict(replica.params)
            for _, correction in waiting[rank]:
                read = {name: read[name] + correction[name] for name in read}
            seen.append(read)
        weights = [entry.read[rank] - read_before[rank] for rank in range(ranks)]
        read_before = list(entry.read)
        if not any(weights):
            continue
        center = update(center, mean(seen, weights))
        for rank, read in enumerate(seen):
            waiting[rank].append((entry.mixed[rank], {name: alpha * (center[name] - read[name]) for name in read}))
    for rank in range(ranks):
        train_until(rank, steps[rank])
    return [replica.params for replica in replicas], center
