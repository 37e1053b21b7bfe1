"""The sampling kernel on a GPU against float64 formulas, against chance, against the CPU, alone and in a graph."""

import pytest
import torch

from sampling.masks import pack
from sampling.params import SamplingParams
from sampling.reference import ReferenceSampler

pytestmark = pytest.mark.gpu

BORDER = 1e-5  # columns this close to the boundary, relatively, may fall on either side
MASS = 1e-5  # as may those at which the mass is this close to top_p
WEIGHT = 2e-5  # bound on the difference of normalised weights


@pytest.fixture(scope="module")
def rapid():
    """A constructor of kernel samplers."""
    from rwkv_batch.kernels.compiler import library
    from sampling.kernel import KernelSampler

    lib = library(0)

    def make(num_slots, ids, **options):
        ids = torch.arange(ids) if isinstance(ids, int) else ids
        return KernelSampler(num_slots, ids, "cuda:0", lib, **options)

    return make


def unpenalized(**controls):
    return SamplingParams(alpha_presence=0, alpha_frequency=0, **controls)


def start(sampler, params, choices=None):
    sampler.start_many(list(range(len(params))), params, choices or [0] * len(params))
    return torch.arange(len(params), device="cuda")


def random_logits(generator, num_rows, num_columns, dtype):
    """Rows of many characters: flat, peaked, tied, with masked columns."""
    z = torch.randn(num_rows, num_columns, generator=generator)
    z *= torch.tensor([0.0, 0.01, 1.0, 3.0, 10.0, 30.0])[torch.randint(6, (num_rows, 1), generator=generator)]
    character = torch.randint(4, (num_rows, 1), generator=generator)
    z = torch.where(character == 0, z.round(), torch.where(character == 1, (z * 4).round() / 4, z))
    z = z.to(dtype).float()
    masked = torch.rand(num_rows, num_columns, generator=generator) < 0.5
    some = torch.rand(num_rows, 1, generator=generator) < 0.3
    z = z.masked_fill(masked & some & (torch.arange(num_columns) > 0), -torch.inf)
    return z.to(dtype)


def boundary64(z, params):
    """(theta as probability, weights [V]) of one row in float64, by the letter."""
    x = z.double() / params.temperature
    q = (x - x.max()).exp()
    q = q / q.sum()
    n = len(q)
    k = n if params.top_k <= 0 or params.top_k > n else params.top_k
    p = 2.0 if not 0 < params.top_p < 1 else params.top_p
    best = q.sort(descending=True).values
    sums = best.cumsum(0)
    if params.rule == "joint":
        reached = (torch.arange(1, n + 1, device=q.device) >= k) | (sums >= p)
        theta = best[int(reached.int().argmax())] if reached.any() else best[-1]
        above, equal = q > theta, q == theta
        m, mass = equal.sum(), q[above].sum()
        edge = torch.minimum((p - mass) / m, theta * (k - above.sum()) / m).clamp(torch.zeros_like(theta), theta)
        margin = (sums - p).abs().min()
    else:
        kth = best[k - 1]
        inside = p * q[q >= kth].sum()
        reached = sums >= inside
        last = best[int(reached.int().argmax())] if reached.any() else best[-1]
        theta = torch.maximum(kth, last)
        above, equal = q > theta, q == theta
        edge = theta
        margin = (sums - inside).abs().min()
    return q, theta, torch.where(above, q, torch.where(equal, edge, 0.0)), float(margin)


@pytest.mark.parametrize("rule", ["joint", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kept_set_and_boundary_weight(rapid, rule, dtype, monkeypatch):
    """Over 2,000 random cases in all: the kept set and the normalised weights are those of the formula.

    Rows that would be drawn until a draw is kept have no boundary to look at. Here the boundary is searched for instead, and
    what they draw otherwise is in the kept set too.
    """
    generator = torch.Generator().manual_seed(10 * len(rule) + dtype.itemsize + (dtype == torch.bfloat16))
    worst = 0.0
    for num_columns in (256, 257, 1000, 4096, 8192, 32000, 50257, 65536):
        num_rows = 44
        logits = random_logits(generator, num_rows, num_columns, dtype).cuda()

        def pick(values):
            return values[int(torch.randint(len(values), (), generator=generator))]

        params = [unpenalized(rule=rule, temperature=pick([0.3, 0.8, 1.0, 1.7]), seed=1,
                              top_k=pick([0, 2, 5, 50, 200, 511, 512, 513, 2000, num_columns - 1, num_columns]),
                              top_p=pick([1e-6, 0.1, 0.5, 0.6, 0.9, 0.999, 1.0])) for _ in range(num_rows)]  # fmt: skip
        sampler = rapid(num_rows, num_columns)
        slots = start(sampler, params)
        redrawn = sampler.sample(logits, slots)
        with monkeypatch.context() as patch:
            patch.setitem(sampler._codes, "rejection", sampler._codes["joint"])
            start(sampler, params)
        sampler.boundary = torch.full((num_rows, 3), float("nan"), device="cuda")
        sampled = sampler.sample(logits, slots)
        assert sampled.finite.all()
        assert redrawn.finite.all()
        for row in range(num_rows):
            z, p = logits[row].float(), params[row]
            q, theta, weights, margin = boundary64(z, p)
            for id in (int(sampled.ids[row]), int(redrawn.ids[row])):
                assert weights[id] > 0 or abs(float(q[id] / theta) - 1) < BORDER or margin < MASS, (num_columns, row, p)
            found, edge, total = sampler.boundary[row].tolist()
            if total != total:
                assert p.top_p >= 1 or p.top_p <= 0
                assert p.top_k >= num_columns or p.top_k <= 0
                continue  # no filter
            e = ((z.double() - z.double().max()) / p.temperature).exp()
            got = torch.where(z > found, e, torch.where(z == found, edge, 0.0))
            assert abs(float(got.sum()) / total - 1) < 1e-4
            differs = (got > 0) != (weights > 0)
            if margin >= MASS and theta > 0:  # a boundary of probability zero cuts nothing off
                assert ((q[differs] / theta - 1).abs() < BORDER).all(), (num_columns, row, p)
                error = float((got / got.sum() - weights / weights.sum()).abs().sum())
                allowed = WEIGHT + 3e-6 / float(weights.sum())
                assert error < allowed or differs.any(), (num_columns, row, p, error)
                worst = max(worst, error)
    print(f"{rule} {dtype}: worst weight error {worst:.1e}")


def case(**controls):
    return controls


CHI_CASES = [
    *[case(rule=r, top_k=k, top_p=p, temperature=t) for r in ("joint", "sequential")
      for k, p, t in ((0, 1.0, 1.0), (50, 0.6, 1.0), (5, 1.0, 0.7), (0, 0.5, 1.3), (20, 0.95, 2.0), (3, 0.3, 1.0),
                      (2, 0.99, 1.0),
                      (64, 0.8, 0.5), (0, 0.999, 1.0), (7, 0.77, 3.0))],
    *[case(rule="gumbel", temperature=t) for t in (0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 0.2)],
    *[case(rule="noise", temperature=t, noise=n) for t, n in ((1.0, 1.5), (1.0, 3.0), (0.5, 1.5), (2.0, 0.5), (1.0, 8.0),
                                                             (1.5, 2.0), (0.8, 1.0), (1.0, 0.1), (3.0, 3.0), (1.0, 5.0))],
    *[case(rule="joint", top_k=k, top_p=p, temperature=1.0)
      for k, p in ((1000, 0.9), (0, 0.3), (600, 1.0), (0, 0.9), (50, 1.0), (512, 0.99), (513, 1.0), (40, 0.9), (0, 0.05),
                   (100, 0.5))],
    *[case(rule="joint", top_k=0, top_p=p, temperature=t)
      for p, t in ((0.25, 1.0), (0.6, 1.0), (0.6, 2.0), (0.9, 0.8), (0.97, 1.0))],
]  # fmt: skip
WIDE, TIED = 40, 50  # the first numbers of cases with 4,096 columns, and of cases whose columns are equal to many others


@pytest.mark.parametrize("number", range(len(CHI_CASES)))
def test_draws_follow_the_distribution(rapid, number):
    """Chi-square at 1e-4 over 262,144 draws."""
    chosen, num_columns, num_rows, rounds = CHI_CASES[number], (4096 if number >= WIDE else 64), 8192, 32
    generator = torch.Generator().manual_seed(number)
    row = (torch.randn(num_columns, generator=generator) * 2).cuda()
    if number >= TIED:
        row = (row * 2).round() / 2
    params = unpenalized(**chosen)
    sampler = rapid(num_rows, num_columns)
    slots = start(sampler, [unpenalized(**chosen, seed=i + 7) for i in range(num_rows)])
    counts = torch.zeros(num_columns, dtype=torch.float64, device="cuda")
    for _ in range(rounds):
        ids = sampler.sample(row.expand(num_rows, -1), slots).ids
        counts += torch.bincount(ids, minlength=num_columns)
    x = row.double() / params.temperature
    if params.rule == "noise":
        # P(argmax of x + U(0, n)) by numerical integration over the largest value.
        y = torch.linspace(float(x.max()), float(x.max()) + params.noise, 200_001, dtype=torch.float64, device="cuda")
        cdf = ((y[:, None] - x) / params.noise).clamp(0, 1)
        inside = ((y[:, None] >= x) & (y[:, None] <= x + params.noise)).double() / params.noise
        log_all = cdf.clamp(min=1e-300).log().sum(1)
        density = inside * (log_all[:, None] - cdf.clamp(min=1e-300).log()).exp()
        expected = torch.trapezoid(density, y, dim=0)
        expected = expected / expected.sum()
    elif params.rule == "gumbel":
        expected = x.softmax(0)
    else:
        weights = boundary64(row, params)[2]
        expected = weights / weights.sum()
    expected = expected * num_rows * rounds
    assert counts[expected == 0].sum() == 0
    rare = expected < 8
    if params.rule == "gumbel":  # its noise ends at 9.7: columns far below the best win less often than the softmax says
        rare |= x < x.max() - 6
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    kept = wanted > 8
    kept[-1] &= params.rule != "gumbel"
    statistic = float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum())
    freedom = int(kept.sum()) - 1
    if freedom < 1:
        return
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty, 1e-4
    assert statistic < limit, (chosen, statistic, limit)


def test_penalties_follow_the_recurrence(rapid):
    """Forty steps of greedy and drawn rows beside the CPU reference: same ids, same penalties to fp32 rounding."""
    num_rows, num_columns = 24, 5000
    generator = torch.Generator().manual_seed(3)
    params = [SamplingParams(rule="sequential" if i % 2 else "joint", temperature=0 if i % 3 == 0 else 1.0, seed=i,
                             alpha_presence=[0.5, 0.0, 2.0][i % 3], alpha_frequency=[0.1, 0.4][i % 2],
                             alpha_decay=[0.996, 0.9, 1.0, 0.0][i % 4]) for i in range(num_rows)]  # fmt: skip
    cpu = ReferenceSampler(num_rows, torch.arange(num_columns))
    cpu.start_many(list(range(num_rows)), params, list(range(num_rows)))
    gpu = rapid(num_rows, num_columns)
    slots = start(gpu, params, list(range(num_rows)))
    different = 0
    for _ in range(40):
        logits = torch.randn(num_rows, num_columns, generator=generator).half()
        logits[:, :40] += 4  # so that tokens come again
        one = cpu.sample(logits, torch.arange(num_rows), list(range(num_rows)))
        two = gpu.sample(logits.cuda(), slots)
        different += int((one.ids != two.ids.cpu()).sum())
        if different:
            break
        error = (gpu.penalties(slots).cpu() - cpu.controls.penalties).abs().max()
        assert error < 1e-5
    assert different <= 1, "draws may part at a rounding, once"


MIXED = [case(top_k=50, top_p=0.6), case(top_k=0, top_p=0.9), case(top_k=0, top_p=1.0), case(temperature=0),
         case(rule="sequential", top_k=40, top_p=0.8), case(rule="gumbel"), case(rule="noise", noise=1.5)]  # fmt: skip
ALONE = [case(top_k=0, top_p=0.6), case(top_k=0, top_p=0.25), case(top_k=0, top_p=0.999), case(top_k=0, top_p=0.2),
         case(top_k=0, top_p=0.8, temperature=0.7, logit_bias=((5, 9.0), (70, -100.0)), ignore_eos=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("controls", "scale", "dtype"),
    [(MIXED, 3.0, torch.float16), (ALONE, 1.0, torch.float16), (ALONE, 2.0, torch.float32), (ALONE, 0.0, torch.float16)],
)
def test_same_seed_same_ids_for_any_batch_and_in_a_graph(rapid, controls, scale, dtype):
    """B = 1, 7, 64, 320, shuffled neighbours, eager and replayed: bit for bit; and the CPU agrees up to rounding."""
    num_columns, steps = 65536, 6
    generator = torch.Generator().manual_seed(5)
    logits = [(torch.randn(320, num_columns, generator=generator) * scale).to(dtype).cuda() for _ in range(steps)]
    params = [SamplingParams(**controls[i % len(controls)], seed=i, alpha_presence=0.5 * (i % 2), alpha_frequency=0.1 * (i % 2))
              for i in range(320)]  # fmt: skip

    def run(rows, graphed=False):
        sampler = rapid(320, num_columns)
        start(sampler, params)
        slots = torch.tensor(rows, device="cuda")
        static = logits[0][slots].clone()
        ids = []
        if graphed:
            sampler.sample(static, slots)  # warm
            torch.cuda.synchronize()
            start(sampler, params)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = sampler.launch(static, slots)
            start(sampler, params)
        for step in range(steps):
            static.copy_(logits[step][slots])
            if graphed:
                graph.replay()
            else:
                out = sampler.sample(static, slots)
            ids.append(out.ids.clone())
        return dict(zip(rows, torch.stack(ids, 1).cpu().tolist(), strict=True))

    whole = run(list(range(320)))
    order = torch.randperm(320, generator=generator).tolist()
    for rows, graphed in ((order, False), (order[:64], True), (order[:7], False), ([5], True), (list(range(320)), True)):
        got = run(rows, graphed)
        assert all(got[row] == whole[row] for row in rows), (len(rows), graphed)
    cpu = ReferenceSampler(320, torch.arange(num_columns))
    cpu.start_many(list(range(320)), params, [0] * 320)
    some = order[:70]
    same = total = 0
    alive = set(some)
    for step in range(steps):
        ids = cpu.sample(logits[step][some].cpu(), torch.tensor(some), some).ids.tolist()
        for row, id in zip(some, ids, strict=True):
            if row in alive:
                total += 1
                same += id == whole[row][step]
                if id != whole[row][step]:
                    alive.discard(row)
    rounded = 2 if controls is MIXED else 2 + total // 50  # flat rows have more borders between columns
    assert same >= total - rounded, (same, total)


@pytest.mark.parametrize(
    ("character", "num_rows", "num_columns"),
    [("flat", 1024, 65536), ("peaked", 1024, 65536), ("tied", 1024, 65536), ("equal", 1024, 65536), ("flat", 300, 131072)],
)
def test_rejected_draws_are_those_of_the_reference(rapid, character, num_rows, num_columns):
    """Rows by top_p alone, several thousand draws each, beside the reference on the same device."""
    generator = torch.Generator("cuda").manual_seed(7)
    reference = ReferenceSampler(num_rows, torch.arange(num_columns, device="cuda"), "cuda")
    gpu, slot_list = rapid(num_rows, num_columns), list(range(num_rows))
    same = total = 0
    for round in range(3):
        logits = torch.randn(num_rows, num_columns, generator=generator, device="cuda")
        if character == "peaked":
            logits = logits * 2 + 9 * (torch.rand(num_rows, num_columns, generator=generator, device="cuda") < 3e-4)
        logits = (logits * (0 if character == "equal" else 1)).half()
        if character == "tied":
            logits = (logits * 4).round() / 4
        params = [unpenalized(top_k=0, top_p=[0.25, 0.3, 0.6, 0.6, 0.9, 0.99][i % 6], temperature=[1.0, 0.7][i % 2],
                              seed=1024 * round + i) for i in range(num_rows)]  # fmt: skip
        reference.start_many(slot_list, params, slot_list)
        slots = start(gpu, params, slot_list)
        for _ in range(2):
            same += int((reference.sample(logits, slots, slot_list).ids == gpu.sample(logits, slots).ids).sum())
            total += num_rows
    assert same >= 0.97 * total, (same, total)


@pytest.mark.parametrize("num_rows", [12, 240])  # blocks that share a row, and a block for each
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_penalized_rejected_draws_are_those_of_the_reference(rapid, dtype, num_rows):
    """After a history that touched few vectors, or neighbours, or all, with bias and the end masked: values are no halves."""
    num_columns, history = 8197, 150
    generator = torch.Generator("cuda").manual_seed(num_rows)
    params = [SamplingParams(top_k=0, top_p=[0.3, 0.6, 0.9][i % 3], temperature=[1.0, 0.7][i % 2], seed=i, alpha_decay=0.99,
                             alpha_presence=[0.3, 0.0317][i // 2 % 2], alpha_frequency=0.011, ignore_eos=i // 3 % 2 == 1,
                             logit_bias=((0, 3.0), (17, 1.003), (4000, -1.7), (8196, 2.0)) if i % 4 == 3 else ())
              for i in range(num_rows)]  # fmt: skip
    reference = ReferenceSampler(num_rows, torch.arange(num_columns, device="cuda"), "cuda")
    gpu, slot_list = rapid(num_rows, num_columns), list(range(num_rows))
    reference.start_many(slot_list, params, slot_list)
    slots = start(gpu, params, slot_list)
    widths = torch.tensor([num_columns, 1500], device="cuda")[torch.arange(num_rows, device="cuda") % 2]
    for _ in range(history):
        hit = (torch.rand(num_rows, generator=generator, device="cuda") * (widths - 1)).long() + 1
        logits = torch.zeros(num_rows, num_columns, dtype=dtype, device="cuda").scatter_(1, hit[:, None], 60000.0)
        one, two = reference.sample(logits, slots, slot_list), gpu.sample(logits, slots)
        assert torch.equal(one.ids, hit)
        assert torch.equal(two.ids, hit)
    same = total = 0
    alive = torch.ones(num_rows, dtype=torch.bool, device="cuda")
    for _ in range(8):
        logits = torch.randn(num_rows, num_columns, generator=generator, device="cuda").to(dtype)
        one, two = reference.sample(logits, slots, slot_list), gpu.sample(logits, slots)
        same += int((one.ids == two.ids)[alive].sum())
        total += int(alive.sum())
        alive &= one.ids == two.ids
        error = (gpu.penalties(slots) - reference.controls.penalties)[alive].abs().max()
        assert error < 1e-5
    assert same >= 0.97 * total, (same, total)


@pytest.mark.parametrize("num_rows", [20, 400])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_perturbed_draws_are_those_of_the_reference(rapid, dtype, num_rows):
    """Flat, peaked, tied and mostly masked rows, with bias and the end masked, beside the reference on the same device."""
    controls = [case(rule="gumbel"), case(rule="gumbel", temperature=0.4), case(rule="gumbel", temperature=6.0),
                case(rule="noise", noise=1.5), case(rule="noise", noise=30.0),
                case(rule="gumbel", ignore_eos=True, logit_bias=((0, 50.0), (3, 2.001), (60000, 5.0))),
                case(rule="gumbel", ignore_eos=True)]  # fmt: skip
    for num_columns in (65536, 70001, 131072):
        generator = torch.Generator("cuda").manual_seed(num_columns)
        params = [unpenalized(**controls[i % len(controls)], seed=i) for i in range(num_rows)]
        logits = torch.randn(num_rows, num_columns, generator=generator, device="cuda")
        character = torch.arange(num_rows, device="cuda")[:, None] // len(controls) % 4
        likely = torch.rand(num_rows, num_columns, generator=generator, device="cuda") < 3e-4
        logits = torch.where(character == 1, logits * 2 + 9 * likely, logits)
        logits = torch.where(character == 2, (logits * 2).round() / 2, logits)
        logits = torch.where((character == 3) & ~likely, -torch.inf, logits).to(dtype)
        reference = ReferenceSampler(num_rows, torch.arange(num_columns, device="cuda"), "cuda")
        sampler, slot_list = rapid(num_rows, num_columns), list(range(num_rows))
        reference.start_many(slot_list, params, slot_list)
        slots = start(sampler, params, slot_list)
        for _ in range(3):
            one, two = reference.sample(logits, slots, slot_list), sampler.sample(logits, slots)
            assert torch.equal(one.finite, two.finite)
            assert (one.ids != two.ids).sum() <= num_rows // 100  # logarithms may differ in their last bit


@pytest.mark.parametrize("num_rows", [33, 330])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_fail_when_the_temperature_makes_them_overflow(rapid, dtype, num_rows):
    """Logits of all magnitudes at the least temperature: the rows that fail, and the ids of the others, are the reference's."""
    controls = [case(temperature=0), case(), case(top_k=0, top_p=1.0), case(top_k=0, top_p=0.6), case(top_k=0, top_p=0.1),
                case(rule="sequential", top_k=40, top_p=0.8), case(top_k=300, top_p=0.99), case(rule="gumbel"),
                case(rule="noise", noise=1.5)]  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(6)
    magnitudes = torch.logspace(0, 38, num_rows, dtype=torch.float64, device="cuda")[:, None]
    for chosen in controls:
        for kind in ("both", "negative", "equal"):
            logits = torch.rand(num_rows, 3000, generator=generator, device="cuda", dtype=torch.float64) * 2 - 1
            logits = logits.abs().neg() - 1 if kind == "negative" else logits * 0 + 1 if kind == "equal" else logits
            logits = (logits * magnitudes).to(dtype)
            params = [unpenalized(**{"temperature": 0.001, **chosen}, seed=i) for i in range(num_rows)]
            reference = ReferenceSampler(num_rows, torch.arange(3000, device="cuda"), "cuda")
            sampler, slot_list = rapid(num_rows, 3000), list(range(num_rows))
            reference.start_many(slot_list, params, slot_list)
            slots = start(sampler, params, slot_list)
            one, two = reference.sample(logits, slots, slot_list), sampler.sample(logits, slots)
            assert torch.equal(one.finite, two.finite), (chosen, kind)
            assert (one.ids != two.ids).sum() <= 1 + num_rows // 100, (chosen, kind)  # a draw may be at a border


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("copies", [1, 60])  # blocks that share a row, and a block for each
def test_rows_that_are_not_finite_fail_alone(rapid, fault, copies):
    controls = copies * [
        case(), case(temperature=0), case(top_k=0, top_p=1.0), case(top_k=0, top_p=0.6), case(top_k=0, top_p=0.1),
        case(rule="sequential", top_k=40, top_p=0.8), case(rule="gumbel"), case(rule="noise", noise=1.5),
    ]  # fmt: skip
    num_rows = len(controls)
    params = [unpenalized(seed=i, **c) for i, c in enumerate(controls)]
    logits = torch.randn(num_rows, 1000, generator=torch.Generator().manual_seed(1)).cuda()
    clean = rapid(num_rows, 1000)
    ids = clean.sample(logits, start(clean, params)).ids
    for failing in (torch.arange(num_rows) % 2 == 0, torch.arange(num_rows) % 2 == 1):
        broken = logits.clone()
        broken[failing.cuda(), slice(None) if fault == -torch.inf else 500] = fault
        sampler = rapid(num_rows, 1000)
        sampled = sampler.sample(broken, start(sampler, params))
        assert sampled.finite.tolist() == (~failing).tolist()
        assert torch.equal(sampled.ids[~failing.cuda()], ids[~failing.cuda()])


def test_masks_bias_end_and_padding(rapid):
    """Ids that are not allowed never come; bias and the masked end token act; slot -1 is left alone; ids map columns."""
    ids = torch.arange(0, 3000, 3)
    allowed = torch.rand(1000, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed[0] = allowed[7] = True
    sampler = rapid(8, ids)
    sampler.masks.put(dict.fromkeys(range(8), pack(allowed)))
    params = [unpenalized(seed=i, top_k=0, top_p=1.0) for i in range(6)]
    params += [unpenalized(temperature=0, logit_bias=((21, 100.0),)), unpenalized(temperature=0, ignore_eos=True)]
    start(sampler, params)
    logits = torch.zeros(8, 1000).cuda()
    logits[:, 0] = 50
    slots = torch.tensor([0, 1, -1, 3, 4, 5, 6, 7], device="cuda")
    sampled = sampler.sample(logits, slots)
    assert sampled.ids[6] == 21
    assert sampled.ids[7] != 0
    assert sampled.ids[0] == 0
    assert sampler.controls.step.tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    flat = torch.zeros(8, 1000).cuda()
    for _ in range(50):
        got = sampler.sample(flat, torch.arange(8, device="cuda")).ids
        assert allowed[(got.cpu() // 3)].all()


def test_logprobs(rapid):
    params = [SamplingParams(seed=1, logprobs=3), SamplingParams(seed=2), SamplingParams(temperature=0, logprobs=0)]
    sampler = rapid(3, 500)
    slots = start(sampler, params)
    logits = torch.randn(3, 500).cuda()
    sampled = sampler.sample(logits, slots, [0, 1, 2])
    expected = logits.double().log_softmax(-1)
    assert abs(sampled.logprobs[0] - expected[0, sampled.ids[0]]) < 1e-5
    assert sampled.logprobs[1].isnan()
    assert sampled.top_ids[0].tolist() == expected[0].topk(3).indices.tolist()
    assert sampler.controls.step.tolist() == [1, 1, 1]


def test_rows_far_apart_unaligned_and_prepared_outputs(rapid):
    """Logits that are part of a wider tensor, at any alignment; results in tensors of the caller; padding and `last_ids`."""
    params = [SamplingParams(seed=i, **CHI_CASES[i]) for i in range(0, 40, 2)]
    num_rows, num_columns = len(params), 65_533
    wide = (torch.randn(num_rows, 65_552, generator=torch.Generator().manual_seed(2)) * 3).half().cuda()
    last_ids = torch.full((num_rows,), -7, device="cuda")
    expected = None
    for first in (0, 1, 2, 8):
        logits = wide[:, first : first + num_columns]
        same = logits.clone()
        one, two = rapid(num_rows, num_columns), rapid(num_rows, num_columns, last_ids=last_ids)
        slots = start(one, params)
        start(two, params)
        ids = torch.full((num_rows,), -5, device="cuda")
        finite = torch.zeros(num_rows, dtype=torch.bool, device="cuda")
        for _ in range(3):
            expected = one.sample(same, slots).ids
            two.launch(logits, slots, out_ids=ids, out_finite=finite, stream=torch.cuda.current_stream().cuda_stream)
            assert torch.equal(ids, expected)
            assert torch.equal(last_ids, expected)
            assert finite.all()
    before = last_ids[4].item()
    two.launch(logits, slots.masked_fill(slots == 4, -1), out_ids=ids, out_finite=finite)
    assert (ids[4], last_ids[4], two.controls.step[4]) == (0, before, 3)


def test_long_bias(rapid):
    """As many entries as there is room for, beside rows with none; what a slot had before is gone."""
    sampler = rapid(2, 3000, max_bias=700)
    many = tuple((token, 1.0 + token / 1000) for token in range(700))
    logits = torch.zeros(2, 3000).cuda()
    slots = start(sampler, [unpenalized(temperature=0, logit_bias=many), unpenalized(temperature=0, logit_bias=((9, 1.0),))])
    assert sampler.sample(logits, slots).ids.tolist() == [699, 9]
    start(sampler, [unpenalized(temperature=0, logit_bias=((5, 1.0),)), unpenalized(temperature=0)])
    assert sampler.sample(logits, slots).ids.tolist() == [5, 0]
    with pytest.raises(ValueError, match="logit_bias"):
        start(sampler, [unpenalized(logit_bias=tuple((token, 1.0) for token in range(701)))])


def test_the_check_passes_here_and_notices_a_wrong_kernel(rapid, monkeypatch):
    from rwkv_batch.kernels.compiler import library
    from sampling import kernel, self_check

    assert self_check.check("cuda:0", library(0)) == []
    codes = kernel.method_codes(library(0))
    wrong = {**codes, "joint": codes["plain"], "rejection": codes["plain"]}
    monkeypatch.setattr(kernel, "method_codes", lambda library: wrong)
    assert self_check.check("cuda:0", library(0)) == [name for name in self_check.CHECKED if name.startswith("joint")]


def test_flashinfer_keeps_what_the_kernel_keeps():
    """Its filters and our draws give the kernel's ids but at boundaries, in a graph too; other rules are untouched."""
    from rwkv_batch.kernels.compiler import library
    from sampling import factory, flashinfer

    if reason := flashinfer.missing():
        pytest.skip(reason)
    num_rows, num_columns, steps = 96, 65536, 8
    controls = [case(rule="sequential", top_k=40, top_p=0.8), case(rule="sequential", top_k=0, top_p=0.7),
                case(rule="sequential", top_k=100, top_p=1.0), case(top_k=50, top_p=0.6), case(temperature=0),
                case(rule="gumbel")]  # fmt: skip
    params = [SamplingParams(**controls[i % 6], seed=i, alpha_presence=0.5 * (i % 2)) for i in range(num_rows)]
    generator = torch.Generator("cuda").manual_seed(1)
    logits = [(torch.randn(num_rows, num_columns, generator=generator, device="cuda") * 3).half() for _ in range(steps)]
    ids = []
    for name in ("rapid", "flashinfer"):
        sampler = factory.make_sampler(name, num_rows, torch.arange(num_columns), "cuda:0", library(0))
        slots = start(sampler, params)
        static = logits[0].clone()
        sampler.launch(static, slots)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sampler.launch(static, slots)
        start(sampler, params)
        drawn = []
        for step in range(steps):
            static.copy_(logits[step])
            graph.replay()
            drawn.append(out.ids.clone())
        ids.append(torch.stack(drawn))
    assert (ids[0] == ids[1]).float().mean() > 0.99
    others = torch.arange(num_rows) % 6 > 2
    assert torch.equal(ids[0][:, others], ids[1][:, others])
