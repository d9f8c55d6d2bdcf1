"""The pair of buffers that all calls share: small inputs on their way in, small outputs out."""

from __future__ import annotations

from dflash_trt.hardware.device import Device, HostBytes


class Staging:
    """A device buffer for inputs and its pinned twin on the host."""

    def __init__(self, device: Device, size: int, purpose: str) -> None:
        self._device = device
        self.address = device.allocate(size, purpose)
        self.host = device.allocate_host(size)

    def upload(self, size: int) -> None:
        self._device.upload(self.address, self.host[:size])


class Results:
    """A device buffer for outputs and two pinned twins on the host.

    So one call's results can be read while those of a step ahead are on their way.
    """

    def __init__(self, device: Device, size: int, purpose: str) -> None:
        self._device = device
        self.address = device.allocate(size, purpose)
        self._sides = [(device.allocate_host(size), device.make_event()) for _ in range(2)]

    @property
    def host(self) -> HostBytes:
        """The current call's results, once they have been waited for."""
        return self._sides[0][0]

    def turn(self) -> None:
        """Makes the results ahead the current ones."""
        self._sides.reverse()

    def download(self, size: int, *, ahead: bool = False) -> None:
        """Enqueues the way to the host of the current call's results, or of those `ahead`."""
        host, event = self._sides[ahead]
        self._device.download(host[:size], self.address)
        self._device.record(event)

    def wait(self) -> None:
        """Waits for the current call, and not for what has been enqueued behind it."""
        _, event = self._sides[0]
        self._device.wait(event)
