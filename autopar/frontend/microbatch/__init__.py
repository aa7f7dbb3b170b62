"""Microbatches: what a step means when its gradients are taken one microbatch at a time, exactly."""

from autopar.frontend.microbatch.serial import serial as serial
