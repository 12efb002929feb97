"""The registry's rules: views, stale incarnations, silence, loss, and learning again after a restart."""

from __future__ import annotations

from actors.registry.machine import HEARTBEATS_MISSED_MAX, RegistryMachine
from actors.runtime.machine import Effect, Send, StartTimer, StopTimer
from messages.base import GATEWAY, SUPERVISOR, Message, control_address
from messages.cluster import (
    ClusterView,
    Heartbeat,
    InstanceInfo,
    InstanceLost,
    InstanceRole,
    InstanceSilent,
    LinkReport,
    RegisterInstance,
    ViewRequest,
)
from messages.layout import Manifest
from messages.timers import InstanceTimer

MANIFEST = Manifest(
    instance="",
    incarnation=1,
    rank=0,
    tp_size=1,
    model_fingerprint="",
    block_size=4,
    block_count=10,
    slot_count=4,
    speculative_tokens=0,
    regions=(),
    tensors=(),
    max_tokens_per_chunk=8,
    max_model_len=100,
)


def info(instance: str, incarnation: int = 1, role: InstanceRole = "PREFILL") -> InstanceInfo:
    return InstanceInfo(
        instance=instance,
        incarnation=incarnation,
        role=role,
        tp_size=1,
        max_model_len=100,
        block_count=10,
        slot_count=4,
        manifests=(MANIFEST,),
    )


def heartbeat(
    instance: str, incarnation: int = 1, view_version: int = -1, links: tuple[LinkReport, ...] = ()
) -> Heartbeat:
    return Heartbeat(
        instance=instance,
        incarnation=incarnation,
        running=1,
        waiting=2,
        blocks_free=3,
        blocks_total=10,
        slots_free=2,
        slots_total=4,
        view_version=view_version,
        links=links,
    )


def sends(effects: list[Effect]) -> list[tuple[str, Message]]:
    return [(effect.to, effect.message) for effect in effects if isinstance(effect, Send)]


def views(effects: list[Effect]) -> dict[str, ClusterView]:
    return {to: message for to, message in sends(effects) if isinstance(message, ClusterView)}


class Harness:
    def __init__(self, incarnation: int = 1) -> None:
        self.machine = RegistryMachine(node="front", incarnation=incarnation, heartbeat_ms=100)
        self.machine.start(0)

    def register(self, instance: str, incarnation: int = 1, role: InstanceRole = "PREFILL") -> list[Effect]:
        address = control_address(instance, "scheduler")
        return self.machine.handle(0, address, RegisterInstance(info=info(instance, incarnation, role)))

    def beat(self, instance: str, incarnation: int = 1, view_version: int = -1) -> list[Effect]:
        message = heartbeat(instance, incarnation, view_version)
        return self.machine.handle(0, control_address(instance, "scheduler"), message)

    def lose(self, instance: str, incarnation: int = 1) -> list[Effect]:
        return self.machine.handle(
            0, SUPERVISOR, InstanceLost(instance=instance, incarnation=incarnation, reason="exit 9")
        )

    def say_links(self, instance: str, *links: LinkReport, incarnation: int = 1) -> list[Effect]:
        message = heartbeat(instance, incarnation, links=links)
        return self.machine.handle(0, control_address(instance, "scheduler"), message)

    def view(self) -> ClusterView:
        ((_, view),) = sends(self.machine.handle(0, "x/y", ViewRequest()))
        assert isinstance(view, ClusterView)
        return view

    def silence(self, instance: str, incarnation: int = 1) -> list[Effect]:
        timer = InstanceTimer(instance=instance, incarnation=incarnation, purpose="silence")
        return self.machine.handle(0, "front/registry", timer)

    def names(self) -> list[tuple[str, int]]:
        (send,) = sends(self.machine.handle(0, "x/y", ViewRequest()))
        assert isinstance(send[1], ClusterView)
        return [(item.instance, item.incarnation) for item in send[1].instances]


def test_a_registration_is_announced_to_the_gateway_and_every_scheduler_the_new_one_included() -> None:
    registry = Harness()
    registry.register("p0")
    announced = views(registry.register("d0", role="DECODE"))
    assert set(announced) == {GATEWAY, "p0.ctl/scheduler", "d0.ctl/scheduler"}
    assert [item.instance for item in announced[GATEWAY].instances] == ["d0", "p0"]


def test_a_repeated_registration_is_answered_with_the_view_and_announced_to_nobody_else() -> None:
    registry = Harness()
    first = views(registry.register("p0"))[GATEWAY]
    again = views(registry.register("p0"))
    assert again == {"p0.ctl/scheduler": first}


def test_every_change_of_the_view_raises_its_version() -> None:
    registry = Harness()
    versions = [
        views(registry.register("p0"))[GATEWAY].version,
        views(registry.register("d0"))[GATEWAY].version,
        views(registry.lose("d0"))[GATEWAY].version,
    ]
    assert versions == sorted(set(versions))


def test_a_loss_told_by_the_supervisor_removes_the_instance_and_tells_everybody_else() -> None:
    registry = Harness()
    registry.register("p0")
    registry.register("d0")
    effects = registry.lose("d0")
    lost = [to for to, message in sends(effects) if isinstance(message, InstanceLost)]
    assert lost == [GATEWAY, "p0.ctl/scheduler"]
    assert views(effects)[GATEWAY].lost == (("d0", 1),)
    assert StopTimer(("silence", "d0")) in effects
    assert registry.names() == [("p0", 1)]


def test_a_loss_of_an_instance_that_never_registered_is_still_told() -> None:
    registry = Harness()
    registry.register("p0")
    effects = registry.lose("d7", 3)
    assert [to for to, message in sends(effects) if isinstance(message, InstanceLost)] == [GATEWAY, "p0.ctl/scheduler"]


def test_stale_incarnations_change_nothing() -> None:
    registry = Harness()
    registry.register("p0", 2)
    assert sends(registry.register("p0", 1)) == []
    assert sends(registry.beat("p0", 1)) == []
    registry.lose("p0", 1)
    assert sends(registry.silence("p0", 1)) == []
    assert registry.names() == [("p0", 2)]
    registry.lose("p0", 2)
    assert sends(registry.register("p0", 2)) == []
    assert sends(registry.beat("p0", 2)) == []
    assert registry.lose("p0", 2) == []
    assert registry.names() == []


def test_a_newer_incarnation_announces_the_loss_of_the_older_one() -> None:
    registry = Harness()
    registry.register("d0")
    registry.register("p0", 1)
    effects = registry.register("p0", 2)
    losses = [(to, message.incarnation) for to, message in sends(effects) if isinstance(message, InstanceLost)]
    assert losses == [(GATEWAY, 1), ("d0.ctl/scheduler", 1)]
    assert registry.names() == [("d0", 1), ("p0", 2)]


def test_every_heartbeat_pushes_the_silence_timer_and_goes_on_to_the_gateway() -> None:
    registry = Harness()
    registry.register("p0")
    effects = registry.beat("p0")
    timer = next(effect for effect in effects if isinstance(effect, StartTimer))
    assert timer.delay_ms == 100 * HEARTBEATS_MISSED_MAX
    forwarded = [message for to, message in sends(effects) if to == GATEWAY]
    assert [type(message) for message in forwarded] == [Heartbeat]


def test_missed_heartbeats_remove_an_instance_without_calling_it_dead_and_a_heartbeat_brings_it_back() -> None:
    registry = Harness()
    registry.register("p0")
    registry.register("d0")
    effects = registry.silence("d0")
    told = [(to, type(message)) for to, message in sends(effects)]
    assert (SUPERVISOR, InstanceSilent) in told
    assert not any(kind is InstanceLost for _, kind in told)
    assert [item.instance for item in views(effects)["p0.ctl/scheduler"].instances] == ["p0"]
    assert "d0.ctl/scheduler" in views(effects)
    assert [item.instance for item in views(registry.beat("d0"))[GATEWAY].instances] == ["d0", "p0"]


def test_a_heartbeat_that_holds_an_old_view_is_answered_with_the_current_one() -> None:
    registry = Harness()
    version = views(registry.register("p0"))[GATEWAY].version
    assert "p0.ctl/scheduler" not in views(registry.beat("p0", view_version=version))
    registry.register("d0")
    assert "p0.ctl/scheduler" in views(registry.beat("p0", view_version=version))


def test_a_restarted_registry_learns_everything_again() -> None:
    registry = Harness(incarnation=2)
    answered = views(registry.beat("p0", 4))
    assert list(answered) == ["p0.ctl/scheduler"]
    assert answered["p0.ctl/scheduler"].instances == ()
    assert answered["p0.ctl/scheduler"].registry_incarnation == 2
    registry.register("p0", 4)
    assert registry.names() == [("p0", 4)]


def linked(instance: str, incarnation: int = 1, refused: str = "") -> LinkReport:
    return LinkReport(instance=instance, incarnation=incarnation, refused=refused)


def pair() -> Harness:
    registry = Harness()
    registry.register("p0")
    registry.register("d0", role="DECODE")
    return registry


def test_a_link_is_in_the_view_once_both_sides_have_it() -> None:
    registry = pair()
    assert not views(registry.say_links("p0", linked("d0"))), "d0 would still refuse an offer of p0"
    assert registry.view().links == ()
    announced = views(registry.say_links("d0", linked("p0")))
    assert set(announced) == {GATEWAY, "p0.ctl/scheduler", "d0.ctl/scheduler"}
    assert announced[GATEWAY].links == (("p0", "d0"),)
    assert not views(registry.say_links("d0", linked("p0"))), "nothing new"


def test_one_side_that_refuses_is_enough_and_its_reason_is_in_the_view() -> None:
    registry = pair()
    registry.say_links("p0", linked("d0"))
    registry.say_links("d0", linked("p0", refused="block sizes differ"))
    assert (registry.view().links, registry.view().refused) == ((), (("p0", "d0", "block sizes differ"),))
    registry.say_links("d0", linked("p0"))
    assert (registry.view().links, registry.view().refused) == ((("p0", "d0"),), ())


def test_a_link_ends_with_either_life_and_a_report_about_an_older_one_makes_none() -> None:
    registry = pair()
    registry.say_links("p0", linked("d0"))
    registry.say_links("d0", linked("p0"))
    registry.register("d0", incarnation=2, role="DECODE")
    assert registry.view().links == ()
    registry.say_links("d0", linked("p0"), incarnation=2)
    assert registry.view().links == (), "p0 still speaks of the first life of d0"
    registry.say_links("p0", linked("d0", incarnation=2))
    assert registry.view().links == (("p0", "d0"),)


def test_a_silent_instance_takes_its_links_out_of_the_view_and_brings_them_back() -> None:
    registry = pair()
    registry.say_links("p0", linked("d0"))
    registry.say_links("d0", linked("p0"))
    registry.silence("d0")
    assert registry.view().links == ()
    registry.register("d0", role="DECODE")
    assert registry.view().links == (("p0", "d0"),)


def test_a_late_report_takes_nothing_back() -> None:
    reports = [linked("d0", refused="no answer"), linked("d0"), linked("d0", incarnation=2, refused="no answer")]
    for last in ((), *((report,) for report in reports)):
        registry = pair()
        registry.say_links("d0", linked("p0"))
        for report in (reports[0], reports[1]):
            registry.say_links("p0", report)
        if last != (reports[2],):
            assert not views(registry.say_links("p0", *last))
            assert registry.view().links == (("p0", "d0"),)
        else:
            registry.say_links("p0", *last)
            assert registry.view().links == (), "it speaks of a life that has not registered"


def with_manifests(view: ClusterView) -> list[str]:
    return [info.instance for info in view.instances if info.manifests]


def test_a_view_has_the_manifests_of_those_that_its_receiver_links_with_and_no_others() -> None:
    harness = Harness()
    harness.register("p0")
    harness.register("m0", role="MIX")
    effects = harness.register("d0", role="DECODE")
    schedulers = {name: control_address(name, "scheduler") for name in ("p0", "d0", "m0")}
    seen = {to: with_manifests(view) for to, view in views(effects).items()}
    assert seen == {GATEWAY: [], schedulers["p0"]: ["d0"], schedulers["d0"]: ["p0"], schedulers["m0"]: []}
    asked = views(harness.machine.handle(0, SUPERVISOR, ViewRequest()))
    assert with_manifests(asked[SUPERVISOR]) == []
    behind = views(harness.beat("p0", view_version=1))
    assert with_manifests(behind[schedulers["p0"]]) == ["d0"]


def test_an_instance_that_a_new_registry_does_not_know_gets_the_manifests_of_any_that_it_may_link_with() -> None:
    harness = Harness(incarnation=2)
    harness.register("p0")
    harness.register("d0", role="DECODE")
    told = views(harness.beat("d1"))[control_address("d1", "scheduler")]
    assert with_manifests(told) == ["d0", "p0"]
