"""The ops that have kernels for both chips: a call runs the kernel of the chip that holds the tensors."""

from redline.kernels.cpu import best as cpu_best
from redline.kernels.cpu import checksum as cpu_checksum
from redline.kernels.cpu import linear as cpu_linear
from redline.kernels.cuda import checksum as cuda_checksum
from redline.kernels.cuda import linear as cuda_linear
from redline.kernels.cuda.step import best as cuda_best
from redline.kernels.kernel import ByChip

best = ByChip(cpu_best.best, cuda_best.best)
checksum = ByChip(cpu_checksum.checksum, cuda_checksum.checksum)
checksums = ByChip(cpu_checksum.checksums, cuda_checksum.checksums)
linear = ByChip(cpu_linear.linear, cuda_linear.linear)
