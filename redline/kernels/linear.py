"""`linear` on whichever chip has the tensors."""

from redline.kernels.cpu import linear as cpu
from redline.kernels.hopper import linear as hopper
from redline.kernels.kernel import ByChip

linear = ByChip(cpu.linear, hopper.linear)
