"""The ops that have kernels for both chips: a call runs the kernel of the chip that holds the tensors."""

from redline.kernels.cpu import best as cpu_best
from redline.kernels.cpu import checksum as cpu_checksum
from redline.kernels.cpu import linear as cpu_linear
from redline.kernels.hopper import checksum as hopper_checksum
from redline.kernels.hopper import linear as hopper_linear
from redline.kernels.hopper.step import best as hopper_best
from redline.kernels.kernel import ByChip

best = ByChip(cpu_best.best, hopper_best.best)
checksum = ByChip(cpu_checksum.checksum, hopper_checksum.checksum)
checksums = ByChip(cpu_checksum.checksums, hopper_checksum.checksums)
linear = ByChip(cpu_linear.linear, hopper_linear.linear)
