"""The stand-in for GPUs finds out each way to use one wrongly, whatever the draw of delays."""

from __future__ import annotations

import pytest
import torch
from support.standin_device import POISON, Hardware, MisuseError, StandInDevice
from support.standin_transport import StandInChannel, StandInCommunicator, StandInPeer

from axsparse.runtime.host_channel import as_bytes
from axsparse.runtime.local.local_world import LocalWorld

EIGHT = torch.arange(8, dtype=torch.uint8)


@pytest.fixture
def hardware() -> Hardware:
    """Nothing runs before `finish`."""
    hardware = Hardware(LocalWorld(2), seed=0)
    hardware.frozen = True
    return hardware


@pytest.fixture
def device(hardware: Hardware) -> StandInDevice:
    return StandInDevice(hardware, 0)


def test_what_has_not_been_computed_is_poison(hardware: Hardware, device: StandInDevice) -> None:
    tensor = device.later(torch.ones(3))

    assert (as_bytes(tensor) == POISON).all()
    hardware.finish()
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_a_copy_must_wait_for_the_compute_that_it_reads(device: StandInDevice) -> None:
    stream, slot, tensor = device.stream(), device.pinned(8), device.later(EIGHT)

    with pytest.raises(MisuseError, match="reads what compute writes"):
        stream.copy(slot, tensor)
    stream.wait(device.compute.record())
    stream.copy(slot, tensor)


def test_a_channel_must_not_send_a_slot_before_the_copy_into_it_has_been_seen_complete(
    hardware: Hardware, device: StandInDevice
) -> None:
    stream, slot = device.stream(), device.pinned(8)
    channel = StandInChannel(device, 0, 1, "a channel")
    stream.copy(slot, EIGHT)
    event = stream.record()

    with pytest.raises(MisuseError, match=r"a send of the channel reads what a copy .* writes"):
        channel.send(slot)
    hardware.finish()
    with pytest.raises(MisuseError, match=r"a send of the channel reads what a copy .* writes"):
        channel.send(slot)  # it has run, but nobody has asked
    assert event.query()
    channel.send(slot)


def test_a_slot_must_not_be_filled_while_the_channel_reads_it(
    hardware: Hardware, device: StandInDevice
) -> None:
    stream, slot = device.stream(), device.pinned(8)
    request = StandInChannel(device, 0, 1, "a channel").send(slot)

    with pytest.raises(MisuseError, match=r"a copy .* writes what a send of the channel reads"):
        stream.copy(slot, EIGHT)
    hardware.finish()
    assert request.query()
    stream.copy(slot, EIGHT)


def test_memory_must_live_until_the_device_is_done_with_it(
    hardware: Hardware, device: StandInDevice
) -> None:
    stream, slot = device.stream(), device.pinned(8)
    tensor = EIGHT.clone()
    stream.copy(slot, tensor)
    del tensor

    with pytest.raises(MisuseError, match="was freed while the device still needed it"):
        hardware.finish()


def test_a_receive_of_another_size_is_found_out(hardware: Hardware) -> None:
    sender, receiver = StandInDevice(hardware, 0), StandInDevice(hardware, 1)
    kept = [receiver.pinned(4), receiver.pinned(4)]
    StandInChannel(sender, 0, 1, "a channel").send(EIGHT)
    StandInChannel(receiver, 0, 1, "a channel").receive(kept[0])
    with pytest.raises(MisuseError, match="4 bytes for 8 that were sent"):
        hardware.finish()

    hardware.queues.clear()
    StandInPeer(sender, "a peer", 0, 1).send(EIGHT)
    StandInPeer(receiver, "a peer", 0, 1).receive(kept[1])
    with pytest.raises(MisuseError, match="4 bytes for 8 that were sent"):
        hardware.finish()


Peers = tuple[StandInDevice, StandInPeer, StandInPeer, torch.Tensor]


@pytest.fixture
def peers(hardware: Hardware) -> Peers:
    """A sender, both ends of a connection, and memory to receive into."""
    sender, receiver = StandInDevice(hardware, 0), StandInDevice(hardware, 1)
    sending, receiving = (StandInPeer(one, "a peer", 0, 1) for one in (sender, receiver))
    return sender, sending, receiving, receiver.pinned(8)


def test_a_receive_must_not_spin_until_its_tensor_is_ready(
    hardware: Hardware, peers: Peers
) -> None:
    sender, sending, receiving, memory = peers
    tensor = sender.later(EIGHT)

    sending.stream.wait(sender.compute.record())
    sending.send(tensor)
    with pytest.raises(MisuseError, match="a receive that spins until a wait ran"):
        receiving.receive(memory)
    hardware.finish()
    receiving.receive(memory)
    hardware.finish()
    assert torch.equal(memory, EIGHT)


def test_a_receive_that_comes_first_must_not_spin_until_its_send_can_run(
    hardware: Hardware, peers: Peers
) -> None:
    sender, sending, receiving, memory = peers
    receiving.receive(memory)
    sending.send(EIGHT)
    hardware.finish()
    assert torch.equal(memory, EIGHT)

    receiving.receive(memory)
    sending.stream.wait(sender.compute.record())
    with pytest.raises(MisuseError, match="a receive that spins until a wait ran"):
        sending.send(EIGHT)


def test_a_connection_goes_one_way(peers: Peers) -> None:
    _, sending, receiving, _ = peers

    with pytest.raises(MisuseError, match="a send at its receiving end"):
        receiving.send(EIGHT)
    with pytest.raises(MisuseError, match="a receive at its sending end"):
        sending.receive(EIGHT)


def test_members_of_a_communicator_do_the_same_in_the_same_order(hardware: Hardware) -> None:
    devices = [StandInDevice(hardware, rank) for rank in range(2)]
    one, other = ([StandInCommunicator(d, name, (0, 1)) for d in devices] for name in "ab")
    buffers = [EIGHT.clone() for _ in range(5)]
    one[0].all_reduce(buffers[0])
    one[0].broadcast(buffers[1])
    other[0].all_reduce(buffers[2])

    with pytest.raises(MisuseError, match="a: members disagree"):
        one[1].broadcast(buffers[3])
    with pytest.raises(MisuseError, match="b: members differ in its order with a"):
        other[1].all_reduce(buffers[4])


def test_an_operation_runs_when_all_members_have_come_to_it(hardware: Hardware) -> None:
    devices = [StandInDevice(hardware, rank) for rank in range(2)]
    members = [StandInCommunicator(device, "a", (0, 1)) for device in devices]
    buffers = [torch.tensor([1.0]), torch.tensor([2.0])]
    members[0].all_reduce(buffers[0])
    hardware.finish()
    assert buffers[0].item() == 1.0

    members[1].all_reduce(buffers[1])
    hardware.finish()

    assert [buffer.item() for buffer in buffers] == [3.0, 3.0]
