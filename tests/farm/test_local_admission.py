"""Several farms on one host, step by step: their reservations are real files, their units are not."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import farmtools
import pytest

from neffbuild.config.build import FarmConfig
from neffbuild.farm.admission import MOST_PASSES, Admitted, Claim, Held, Resources
from neffbuild.farm.local_admission import LocalAdmission
from neffbuild.farm.outcomes import Cause
from neffbuild.farm.schedule import Waiting
from neffbuild.farm.scratch import farm_folder

MIB = 1 << 20


@dataclass
class Host:
    """A host whose available memory a test sets."""

    cpus: int = 8
    total_memory: int = 1000 * MIB
    available: int = 1000 * MIB
    scratch: int = 1 << 40
    cpus_of: str = "this host"
    memory_of: str = "this host"

    def available_memory(self) -> int:
        return self.available

    def free_scratch(self, folder: Path) -> int:
        return self.scratch


@dataclass
class Executor:
    """Holds what a test says its units hold."""

    held: dict[str, int] = field(default_factory=dict)
    ended: list[tuple[str, Cause]] = field(default_factory=list)
    most: float = inf
    why_no_more: str = "the host is full"

    def resident(self) -> dict[str, int]:
        return self.held

    def end(self, key: str, cause: Cause) -> None:
        self.ended.append((key, cause))


@dataclass
class Farm:
    """One farm and what it still has to start."""

    admission: LocalAdmission
    executor: Executor
    waiting: list[Waiting]
    running: dict[str, Resources] = field(default_factory=dict)

    def step(self) -> Admitted | Held | None:
        decision = self.admission.admit(self.waiting)
        if isinstance(decision, Admitted):
            self.running[self.waiting.pop(decision.place).unit.key] = decision.needs
        return decision

    def end(self, key: str) -> None:
        del self.running[key]
        self.admission.release(key)


def farm(stack: ExitStack, host: Host, memory: list[int], **fields: object) -> Farm:
    units = farmtools.make_units(Path("/nowhere"), len(memory))
    executor = Executor()
    config = FarmConfig(**{"memory_fraction": 1.0, **fields})
    folder = stack.enter_context(farm_folder())
    admission = LocalAdmission(host, folder, executor, config, len(units))  # type: ignore[arg-type]
    waiting = [
        Waiting(unit, Claim(Resources(1, size * MIB), 1.0))
        for unit, size in zip(units, memory, strict=True)
    ]
    return Farm(admission, executor, waiting)


def needs_device(one: Farm, *places: int) -> None:
    """The waiting units at these places need the host's device, for an hour."""
    for place in places:
        waiting = one.waiting[place]
        needs = replace(waiting.claim.needs, devices=1)
        one.waiting[place] = replace(waiting, claim=Claim(needs, 3600.0))


@pytest.mark.parametrize("devices", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(8))
def test_farms_together_stay_within_the_host_and_all_get_done(
    folder: Path, seed: int, devices: float
) -> None:
    source = random.Random(seed)
    host = Host()
    with ExitStack() as stack:
        # Some units are larger than the host: they run alone on it.
        farms = [
            farm(stack, host, [source.choice([50, 200, 600, 1500]) for _ in range(count)])
            for count in (12, 5, 1)
        ]
        for one in farms:
            places = range(len(one.waiting))
            needs_device(one, *[place for place in places if source.random() < devices])
        for _ in range(2000):
            one = source.choice(farms)
            if one.running and source.random() < 0.5:
                one.end(source.choice(list(one.running)))
            else:
                one.step()
            held = [needs for each in farms for needs in each.running.values()]
            total = sum(held, Resources())
            assert total.cpus <= host.cpus
            assert total.devices <= 1
            assert total.memory <= host.total_memory or len(held) == 1
            if not any(each.waiting or each.running for each in farms):
                return
        pytest.fail(f"units still wait: {[len(each.waiting) for each in farms]}")


def test_a_farm_without_units_gets_the_next_room(folder: Path) -> None:
    host = Host()
    with ExitStack() as stack:
        busy = farm(stack, host, [200] * 50)
        while isinstance(busy.step(), Admitted):
            pass
        assert len(busy.running) == 5
        newcomer = farm(stack, host, [900, 900])
        assert isinstance(newcomer.step(), Held)
        while busy.running:
            busy.end(next(iter(busy.running)))
            # It looks first each time, and for the last time when nothing of either runs.
            decision = busy.step()
            assert isinstance(decision, Held)
            assert decision.short == "farms"
        assert isinstance(newcomer.step(), Admitted)
        # Now it is the other way round.
        assert isinstance(busy.step(), Held)
        newcomer.end(next(iter(newcomer.running)))
        assert isinstance(newcomer.step(), Held)
        assert isinstance(busy.step(), Admitted)


def test_a_farm_that_waits_for_the_device_holds_up_no_unit_that_needs_none(folder: Path) -> None:
    host = Host()
    with ExitStack() as stack:
        has, waits, plain = (farm(stack, host, [10] * 5) for _ in range(3))
        needs_device(has, 0, 1)
        needs_device(waits, *range(5))
        assert isinstance(has.step(), Admitted)
        first = next(iter(has.running))
        held = waits.step()
        assert isinstance(held, Held)
        assert held.short == "devices"
        assert isinstance(plain.step(), Admitted)
        assert isinstance(plain.step(), Admitted)
        assert isinstance(has.step(), Admitted)
        has.end(first)
        # Its next device unit leaves the device to the one that waits, and its others go on.
        assert has.step() == Admitted(1, Resources(1, 10 * MIB))
        assert isinstance(waits.step(), Admitted)


def test_the_device_is_left_to_the_farm_that_has_waited_for_it_longest(folder: Path) -> None:
    host = Host()
    with ExitStack() as stack:
        has, waits, later = (farm(stack, host, [10]) for _ in range(3))
        for one in (has, waits, later):
            needs_device(one, 0)
        assert isinstance(has.step(), Admitted)
        assert isinstance(waits.step(), Held)
        assert isinstance(later.step(), Held)
        has.end(next(iter(has.running)))
        # Nothing runs on the host, and still it is not its turn.
        assert later.step() == Held(
            "devices",
            "cores for 8 workers; 0 run: decode_b1_ctx128 needs this host's device, which another unit "
            "has or is to have first",
        )
        assert isinstance(waits.step(), Admitted)


def test_a_farm_short_of_memory_is_yielded_to_though_it_waits_for_the_device_too(
    folder: Path,
) -> None:
    host = Host()
    with ExitStack() as stack:
        has, waits, plain = (farm(stack, host, sizes) for sizes in ([100], [10, 900], [100] * 3))
        needs_device(has, 0)
        needs_device(waits, 0)
        assert isinstance(has.step(), Admitted)
        assert isinstance(plain.step(), Admitted)
        assert isinstance(waits.step(), Held)
        held = plain.step()
        assert isinstance(held, Held)
        assert held.short == "farms"
        plain.end(next(iter(plain.running)))
        assert waits.step() == Admitted(1, Resources(1, 900 * MIB))


def test_units_pass_one_that_waits_for_the_device_for_as_long_as_it_does(folder: Path) -> None:
    host = Host()
    with ExitStack() as stack:
        has, mixed = farm(stack, host, [10]), farm(stack, host, [10] * 3 * MOST_PASSES)
        needs_device(has, 0)
        needs_device(mixed, 0)
        assert isinstance(has.step(), Admitted)
        for _ in range(2 * MOST_PASSES):
            assert mixed.step() == Admitted(1, Resources(1, 10 * MIB))
            mixed.end(next(iter(mixed.running)))
        assert isinstance(mixed.step(), Admitted)
        has.end(next(iter(has.running)))
        assert mixed.step() == Admitted(0, Resources(1, 10 * MIB, devices=1))


def test_a_farm_that_knows_no_devices_can_read_what_holds_none(folder: Path) -> None:
    with ExitStack() as stack:
        one = farm(stack, Host(), [10, 10])
        needs_device(one, 1)
        one.step()
        one.step()
        (document,) = folder.glob("tmp/neffbuild-farms-*/*/farm-*/reservations.json")
        needs = [unit["needs"] for unit in json.loads(document.read_text())["units"]]
        plain = {"cpus": 1, "memory": 10 * MIB, "scratch": 0}
        assert needs == [plain, {**plain, "devices": 1}]


def test_memory_that_other_programs_take_is_waited_for_while_something_runs(folder: Path) -> None:
    host = Host()
    with ExitStack() as stack:
        only = farm(stack, host, [300, 300, 300])
        assert isinstance(only.step(), Admitted)
        host.available = 500 * MIB  # of which the first may still take 300
        held = only.step()
        assert isinstance(held, Held)
        assert held.short == "memory"
        assert held.reason == (
            "cores for 8 workers; 1 run: decode_b2_ctx128 needs 0.3 GiB of memory, "
            "0.2 GiB of the 1.0 GiB for compiles are free"
        )
        host.available = 600 * MIB
        assert isinstance(only.step(), Admitted)


def test_what_bounds_the_run_is_named_where_it_is_not_the_host(folder: Path) -> None:
    group = "this process's control group"
    with ExitStack() as stack:
        confined = Host(cpus=2, cpus_of=group, memory_of=group)
        only = farm(stack, confined, [600, 600, 600], workers=64)
        assert only.admission.fewer == (
            f"64 workers asked for; 2 run at once: {group} has 2 CPU cores, 1 for each"
        )
        assert isinstance(only.step(), Admitted)
        held = only.step()
        assert isinstance(held, Held)
        assert held.reason == (
            "64 workers asked for; 1 run: decode_b2_ctx128 needs 0.6 GiB of memory, 0.4 GiB of the "
            f"1.0 GiB for compiles are free ({group} has 1.0 GiB)"
        )
    with ExitStack() as stack:
        only = farm(stack, Host(memory_of=group), [1500])
        alone = only.step()
        assert isinstance(alone, Admitted)
        assert f"{group} has 1.0 GiB to give: started alone" in str(alone.warning)


def test_scratch_space_is_reserved_too(folder: Path) -> None:
    with ExitStack() as stack:
        only = farm(stack, Host(scratch=100 * MIB), [10, 10], workers=64)
        needs = Resources(1, 10 * MIB, 60 * MIB)
        only.waiting = [Waiting(one.unit, Claim(needs, 1.0)) for one in only.waiting]
        assert isinstance(only.step(), Admitted)
        assert only.step() == Held(
            "scratch",
            "64 workers asked for; 1 run: decode_b2_ctx128 needs 60 MiB of scratch space, 40 MiB are free",
        )


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", '{"units": [{"name": "a"}]}', '{"units": 5}']
)
def test_what_a_farm_of_another_version_writes_counts_for_nothing(folder: Path, text: str) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(farm_folder())
        (other / "reservations.json").write_text(text)
        assert isinstance(farm(stack, Host(), [900]).step(), Admitted)


def test_the_farm_of_the_unit_that_outgrew_its_reservation_most_ends_it(folder: Path) -> None:
    host = Host()
    with ExitStack() as stack:
        farms = [farm(stack, host, [200]) for _ in range(2)]
        for one, size in zip(farms, (250, 700), strict=True):
            one.step()
            one.executor.held = dict.fromkeys(one.running, size * MIB)
            one.admission.watch()
        assert not any(one.executor.ended for one in farms)
        host.available = 30 * MIB
        for one in [*reversed(farms), *farms]:
            # What units hold is told to the other farm at the first look, and acted on at the next.
            assert not any(each.executor.ended for each in farms)
            one.admission._watched = 0.0
            one.admission.watch()
        (innocent, eater) = farms
        assert not innocent.executor.ended
        ((key, cause),) = eater.executor.ended
        assert key in eater.running
        assert "ended at 0.7 GiB, 0.2 GiB of which were reserved for it" in cause.text


def test_a_claim_of_more_cores_than_there_are_runs_alone(folder: Path) -> None:
    with ExitStack() as stack:
        only = farm(stack, Host(cpus=2), [10, 10], cpus=2)
        assert only.admission.workers == 1
        only.waiting = [
            Waiting(one.unit, Claim(Resources(4, 10 * MIB), 1.0)) for one in only.waiting
        ]
        admitted = only.step()
        assert isinstance(admitted, Admitted)
        assert admitted.warning == "expected to use 4 CPU cores; this host has 2"
