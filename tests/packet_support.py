"""Packets made by hand, for the cases that a recording does not have: TCP segments in files of either format."""

from __future__ import annotations

import struct
from ipaddress import ip_address

SYN, ACK, FIN, RST, PSH = 2, 16, 1, 4, 8
ETHERNET, NULL, RAW, LOOP, SLL, IPV4, IPV6, SLL2 = 1, 0, 101, 108, 113, 228, 229, 276


class Talk:
    """One TCP connection, of which each call gives a packet from its IP header on.

    Sequence numbers are counted on by themselves; ``at=`` puts data elsewhere in the stream.
    """

    def __init__(self, client=("10.0.0.1", 40000), server=("10.0.0.2", 3999), first=(1000, 0xFFFFFFF0)):
        self.ends = (client, server)
        self.first = first
        self.sent = [0, 0]

    def open(self):
        return [
            self.packet(True, b"", SYN, self.first[0]),
            self.packet(False, b"", SYN | ACK, self.first[1]),
            self.packet(True, b"", ACK),
        ]

    def up(self, data, **options):
        return self.data(True, data, **options)

    def down(self, data, **options):
        return self.data(False, data, **options)

    def data(self, up, data, at=None, flags=ACK | PSH):
        side = 0 if up else 1
        start = self.sent[side] if at is None else at
        self.sent[side] = max(self.sent[side], start + len(data))
        return self.packet(up, data, flags, self.first[side] + 1 + start)

    def packet(self, up, data, flags, sequence=None):
        (source, source_port), (target, target_port) = self.ends if up else self.ends[::-1]
        if sequence is None:
            sequence = self.first[0 if up else 1] + 1 + self.sent[0 if up else 1]
        other = 1 if up else 0
        ack = self.first[other] + 1 + self.sent[other] if flags & ACK else 0
        numbers = (sequence & 0xFFFFFFFF, ack & 0xFFFFFFFF)
        tcp = struct.pack(">HHIIBBHHH", source_port, target_port, *numbers, 0x50, flags, 512, 0, 0) + data
        source, target = ip_address(source), ip_address(target)
        if source.version == 4:
            head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0x4000, 64, 6, 0)
        else:
            head = struct.pack(">IHBB", 6 << 28, len(tcp), 6, 64)
        return head + source.packed + target.packed + tcp


def linked(packet, link):
    """A packet with its link layer's header before it."""
    version = packet[0] >> 4
    kind = struct.pack(">H", 0x0800 if version == 4 else 0x86DD)
    return {
        ETHERNET: bytes(12) + kind,
        NULL: struct.pack("<I", 2 if version == 4 else 30),
        LOOP: struct.pack(">I", 2 if version == 4 else 24),
        SLL: bytes(14) + kind,
        SLL2: kind + bytes(18),
    }.get(link, b"") + packet


def pcap(packets, link=ETHERNET, order="<", nanoseconds=False, cut=None, step=1_000_000):
    """A pcap file of these packets, `step` nanoseconds apart, of which at most `cut` bytes are kept."""
    magic = 0xA1B23C4D if nanoseconds else 0xA1B2C3D4
    file = bytearray()
    file += struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, cut or 65535, link)
    for i, packet in enumerate(packets):
        data = linked(packet, link)
        fraction = i * step // (1 if nanoseconds else 1000)
        kept = data[:cut]
        file += struct.pack(order + "4I", 1_700_000_000, fraction, len(kept), len(data)) + kept
    return bytes(file)


def block(order, kind, body):
    body += bytes(-len(body) % 4)
    return struct.pack(order + "2I", kind, len(body) + 12) + body + struct.pack(order + "I", len(body) + 12)


def pcapng(packets, links=(ETHERNET,), order="<", ticks=None, old=False):
    """A pcapng file of these packets, a millisecond apart, on several interfaces by turns."""
    file = bytearray()
    file += block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))
    option = b"" if ticks is None else struct.pack(order + "HHB3xHH", 9, 1, ticks, 0, 0)
    for link in links:
        file += block(order, 1, struct.pack(order + "HHI", link, 0, 0) + option)
    file += block(order, 5, bytes(12))  # statistics, which nobody needs
    rate = 10**6 if ticks is None else 2 ** (ticks & 127) if ticks & 128 else 10**ticks
    for i, packet in enumerate(packets):
        data = linked(packet, links[i % len(links)])
        time = 1_700_000_000 * rate + i * rate // 1000
        head = struct.pack(order + ("HH" if old else "I"), *((i % len(links), 0) if old else (i % len(links),)))
        head += struct.pack(order + "4I", time >> 32, time & 0xFFFFFFFF, len(data), len(data))
        file += block(order, 2 if old else 6, head + data)
    return bytes(file)
