"""NVRTC and the CUDA driver through ctypes: compile a source, cache the machine code, launch it.

torch provides both libraries and creates the context; neither CUDA's headers nor nvcc are needed.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from redline.kernels.cpu import native
from redline.kernels.cuda.chips import Chip, chip, refusal

HERE = Path(__file__).parent
# NVRTC supports __builtin_offsetof from 13.4 on; before that its front end has the same builtin under another name.
_KNOWS_OFFSETS = (13, 4)
_OFFSETS = "#define __builtin_offsetof(type, field) __INTADDR__(&((type*)0)->field)\n"

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_log = logging.getLogger(__name__)


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class CudaError(RuntimeError):
    """A call of the driver or of the compiler failed."""


@functools.cache
def why_not() -> str | None:
    """The reason, in one line, why the kernels cannot run on this machine's GPU; None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if (reason := refusal(torch.cuda.get_device_name(), torch.cuda.get_device_capability())) is not None:
        return reason
    try:
        _nvrtc()
        _cuda()
    except OSError as error:
        return f"a CUDA library cannot be loaded ({error})"
    return None


def compiler_missing() -> str | None:
    """Why there is no NVRTC, in one line; None if there is."""
    try:
        _nvrtc()
    except OSError as error:
        return str(error)
    return None


class Function:
    """One kernel of one source, on the current device. check: as in `machine_code`."""

    def __init__(self, source: Path, name: str, options: Sequence[str], shared: int, check: str) -> None:
        self._source = source
        self._check = check
        self._name = name
        self._options = tuple(options)
        self._shared = shared
        self._code: bytes | None = None  # compiled, not loaded yet
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._attribute = _Attribute(id=_STREAM_SERIALIZATION, value=1)

    def compile(self) -> None:
        """Compiles the code, or reads it from the cache; any thread may call it. Raises CudaError with the compiler's
        message."""
        with self._lock:
            if not self._handle and self._code is None:
                self._code = machine_code(self._source, self._options, self._check)

    def load(self) -> None:
        """Loads the code on the current device. Raises CudaError, such as the compiler's message."""
        self.compile()
        with self._lock:
            if self._handle:
                return
            torch.cuda.current_stream()  # creates the context
            module, handle, cuda = ctypes.c_void_p(), ctypes.c_void_p(), _cuda()
            _check(cuda.cuModuleLoadData(ctypes.byref(module), self._code))
            _check(cuda.cuModuleGetFunction(ctypes.byref(handle), module, self._name.encode()))
            _check(cuda.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, self._shared))
            self._handle, self._code = handle, None

    def launch(
        self, arguments: ctypes.Structure, grid: tuple[int, int], threads: int, shared: int, *, overlap: bool
    ) -> None:
        """Enqueues one launch on torch's current stream, with `threads` threads per block; the arguments are copied.

        overlap: whether it may begin before the preceding kernel has ended. Raises CudaError.
        """
        if not self._handle:
            self.load()
        stream = torch.cuda.current_stream().cuda_stream
        attributes = ctypes.pointer(self._attribute)
        launch = _Launch(*grid, 1, threads, 1, 1, shared, stream, attributes, 1 if overlap else 0)
        values = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _check(_cuda().cuLaunchKernelEx(ctypes.byref(launch), self._handle, values, None))


class SharedMemory:
    """Memory of the current device that devices of other processes read and write through CUDA IPC.

    address: in this process. handle: argument of `open_shared` in another process.
    """

    def __init__(self, size: int) -> None:
        """Raises CudaError if the device does not have enough memory, or returns no handle."""
        torch.cuda.current_stream()  # creates the context
        at, handle = ctypes.c_uint64(), _IpcHandle()
        _check(_cuda().cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)))
        self.address = at.value
        self.size = size
        try:
            _check(_cuda().cuIpcGetMemHandle(ctypes.byref(handle), at))
        except CudaError:
            self.free()
            raise
        self.handle = bytes(handle)

    def fill(self, word: int) -> None:
        """Fills the memory with this 32-bit word, and waits for completion."""
        _check(
            _cuda().cuMemsetD32_v2(ctypes.c_uint64(self.address), ctypes.c_uint(word), ctypes.c_size_t(self.size // 4))
        )
        torch.cuda.synchronize()

    def free(self) -> None:
        """Frees the memory; all processes that opened it must have closed it."""
        _check(_cuda().cuMemFree_v2(ctypes.c_uint64(self.address)))


def open_shared(handle: bytes) -> int:
    """This process's address of another process's `SharedMemory`, for the current device. Raises CudaError."""
    torch.cuda.current_stream()  # creates the context
    at, given = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
    _check(_cuda().cuIpcOpenMemHandle_v2(ctypes.byref(at), given, ctypes.c_uint(_LAZY_PEER_ACCESS)))
    return at.value


def close_shared(address: int) -> None:
    """Unmaps memory opened by `open_shared`."""
    _check(_cuda().cuIpcCloseMemHandle(ctypes.c_uint64(address)))


def copy(into: int, source: int, count: int, stream: int) -> None:
    """Enqueues a copy of `count` bytes on a stream. Addresses may be of any memory known to the driver. Raises
    CudaError."""
    target, origin = ctypes.c_uint64(into), ctypes.c_uint64(source)
    _check(_cuda().cuMemcpyAsync(target, origin, ctypes.c_size_t(count), ctypes.c_void_p(stream)))


def machine_code(source: Path, options: Sequence[str], check: str, target: Chip | None = None) -> bytes:
    """A cubin for a chip, by default the current one, from the cache if available. check: C++ that is compiled after
    the source, from `layout_check`."""
    options = [*options, f"-arch={(target or chip()).arch}", "-std=c++17", "-default-device"]
    headers = {file.name: file.read_bytes() for file in sorted((HERE / "blocks").glob("*.cuh"))}
    offsets = _OFFSETS if _nvrtc_version() < _KNOWS_OFFSETS else ""
    text = source.read_bytes() + f"\n{offsets}{check}".encode()
    digest = hashlib.sha256(" ".join(options).encode() + text + b"".join(headers.values()))
    digest.update(str(_nvrtc_version()).encode())
    name = f"cuda-{source.stem}-{digest.hexdigest()[:20]}.cubin"
    with contextlib.suppress(OSError):
        return (native.cache_folder() / name).read_bytes()
    code = compile_source(text, source.name, headers, options)
    _keep(name, code)
    return code


def _keep(name: str, code: bytes) -> None:
    """Writes the code to the cache atomically. If that fails, each process compiles its own."""
    try:
        folder = native.cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            partial.write_bytes(code)
            os.replace(partial, folder / name)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        _log.info("%s is not cached: %s", name, error)


def compile_source(text: bytes, name: str, headers: dict[str, bytes], options: Sequence[str]) -> bytes:
    """The cubin of a source. headers: name -> text. Raises CudaError with the compiler's messages."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
    texts = (ctypes.c_char_p * len(headers))(*headers.values())
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), len(headers), texts, names)
    _check_nvrtc(made)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"{name} does not compile:\n{log.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


def _check_nvrtc(status: int) -> None:
    if status:
        raise CudaError(f"NVRTC error {status}")


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC from torch's own packages, the system, or CUDA_HOME. Raises OSError if none of them has it."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (packages.submodule_search_locations or ())] if packages else []
    candidates = [str(path) for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for candidate in (*candidates, name, f"{home}/lib64/{name}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name} is neither in torch's packages nor on the library path nor in {home}/lib64")


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value
