"""What memory limits cost exact mode, with and without micro-batches: a step over the fluid limit.

Training is virtual, under `paceline` in exact mode. Sizes are lognormal, so that a global batch
often has a sample larger than a rank's fair share. No rank holds more samples at once than an equal
share of the global batch. Without micro-batches each rank therefore gets that many. With them a
rank may get more, and each pass costs ``b`` once more: ``T_j = a_j · Λ_j + b · ⌈n_j / limit⌉``. The
fluid limit is the time of a perfectly divisible load, with one pass in a step.
"""

from __future__ import annotations

import itertools

import numpy as np
from balance import OVERHEAD, Setting
from bounds import fluid_s
from harness import Check, finish, parser
from msgspec.structs import replace
from virtual import train

from paceline_backend import policies
from paceline_backend.simulator import Simulation


def over_limit(setting: Setting, *, micro_batches: bool) -> float:
    """Time of the steps after the first epoch, in which speeds are learnt, over the fluid limit."""
    limit = setting.local_batch
    limits = [] if micro_batches else [limit] * setting.world
    hello = replace(setting.hello, limits=limits)
    trained = train(Simulation(hello, setting.devices, policies.make("paceline"))).since(1)
    a_s, b_s = np.array(setting.devices.a_s), setting.devices.b_s[0]
    of = trained.features
    passes = np.ceil(of.samples / limit)
    step_s = (a_s * of.load + b_s * passes).max(axis=1)
    return float(step_s.sum()) / fluid_s(float(of.load.sum()), len(step_s), a_s, b_s)


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    difs = (64,) if options.quick else (16, 64)
    rows: list[tuple[str, float, float]] = []
    for dif, local, uneven in itertools.product(difs, (4, 16), (False, True)):
        setting = Setting(dif, 8, local, uneven, padded=False)
        without = over_limit(setting, micro_batches=False)
        rows.append((str(setting), without, over_limit(setting, micro_batches=True)))
    most = max(with_them / without for _, without, with_them in rows)
    # A pass more costs about so much: the planner does not know of passes.
    bound = 1 + OVERHEAD
    checks = [Check("time with micro-batches over that without: most", most, bound, "<=")]
    lines = [f"{'step over the fluid limit':<36}{'without':>9}{'with':>9}"]
    lines += [f"{name:<36}{without:>9.3f}{with_them:>9.3f}" for name, without, with_them in rows]
    results = {name: {"without": without, "with": with_them} for name, without, with_them in rows}
    finish(options, {"limit": "an equal share"}, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
