"""Which transport the processes of a step use: told by the devices that they have, as all of them have the same."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.jax_compat import Device
from autopar.runtime.transports import Transport
from autopar.runtime.transports.jax_transfer import JaxTransfer
from autopar.runtime.transports.wire import Wire


def chosen(host: str, secret: bytes, devices: Sequence[Device]) -> Transport:
    """This process's end, at address ``host``: where devices share the host's memory what sends and lands there; else
    what moves arrays of devices."""
    if all(device.platform == "cpu" for device in devices):
        return Wire(host, secret)
    return JaxTransfer(devices, host)
