"""Launch layer: cubins into the driver, argument structs, tensor maps, launches on torch's current stream.

Everything here works inside CUDA-graph capture once a kernel has been loaded (load before capture: a first eager step
does it). Errors carry the kernel's name. With CUDA_LAUNCH_BLOCKING=1 every launch outside capture is waited for, so an
asynchronous fault is reported by the kernel that caused it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache, lru_cache

import torch

from kernels.cuda.build import build
from kernels.errors import KernelError

try:
    from cuda.bindings import driver
except ImportError:  # kernels.cuda.build needs no driver; launching says what is missing
    driver = None  # type: ignore[assignment]

_BLOCKING = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"


class TensorMap(ctypes.Structure):
    """A CUtensorMap inside an argument struct: 128 bytes, first in the struct so that it lies on a 64-byte boundary."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def check(op: str, result: tuple) -> tuple:
    """Unpack a cuda.bindings result tuple; a failure becomes a KernelError naming `op`."""
    if int(result[0]) != 0:
        raise KernelError(op, f"CUDA driver: {result[0]}")
    return result[1:]


def require_hopper(op: str, device: torch.device) -> None:
    """Raise unless `device` is an sm_90 GPU (H100, H200)."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        raise KernelError(
            op,
            f"these kernels need an sm_90 GPU (H100 or H200); {torch.cuda.get_device_name(device)} is "
            f"sm_{capability[0]}{capability[1]}. Run with the reference backend (--kernels reference)",
        )


@cache
def sm_count(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


class Kernel:
    """One loaded __global__ function on one device.

    shared_memory: bytes of dynamic shared memory, read from the cubin's `<name>_smem` when it has one
    beside: leaves L1 at its smallest, so that it starts on SMs where a product still runs. Loads in flight lie in L1:
        where all kernels did, a large fetch_dequant came to 0.73 of copy bandwidth, with L1 as it comes to 0.87
    """

    def __init__(
        self, module: str, name: str, device_index: int, defines: tuple[tuple[str, int], ...] = (), beside: bool = True
    ) -> None:
        if driver is None:
            raise KernelError(name, "cuda-bindings is not installed; pip install cuda-bindings")
        require_hopper(name, torch.device("cuda", device_index))
        if torch.cuda.is_current_stream_capturing():
            raise KernelError(name, "cannot be loaded inside a CUDA-graph capture; run one eager step first")
        self.name = name
        cubin = build(module, dict(defines)).cubin
        with torch.cuda.device(device_index):
            torch.cuda.current_stream()  # makes the primary context current
            self._library = check(name, driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))[0]
            kernel = check(name, driver.cuLibraryGetKernel(self._library, name.encode()))[0]
            self.function = check(name, driver.cuKernelGetFunction(kernel))[0]
            self.argument_bytes = check(name, driver.cuFuncGetParamInfo(self.function, 0))[1]
            self.shared_memory = self._read_int(f"{name}_smem")
            attributes = driver.CUfunction_attribute
            if self.shared_memory:  # what the kernel has beside it counts, too, towards the 48 KB that need no asking
                attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(name, driver.cuFuncSetAttribute(self.function, attribute, self.shared_memory))
            if beside:
                # One split of L1 and shared memory for all: an SM changes it only when idle, so a kernel that wants another
                # one would not start beside the last CTAs of the kernel before it.
                carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                check(name, driver.cuFuncSetAttribute(self.function, carveout, 100))

    def _read_int(self, symbol: str) -> int:
        found = driver.cuLibraryGetGlobal(self._library, symbol.encode())
        if int(found[0]) != 0:
            return 0
        value = ctypes.c_int()
        check(self.name, driver.cuMemcpyDtoH(ctypes.addressof(value), found[1], 4))
        return value.value

    def launch(self, grid: int, block: int, arguments: ctypes.Structure, *, cluster: int = 1, overlap: bool = False) -> None:
        """Launch on torch's current stream of the current device.

        arguments: the kernel's one argument, passed by value; its size must equal the device struct's.
        overlap: start while the stream's previous kernel finishes (the kernel waits for its memory itself).
        """
        if ctypes.sizeof(arguments) != self.argument_bytes:
            raise KernelError(
                self.name, f"argument struct has {ctypes.sizeof(arguments)} bytes, the kernel expects {self.argument_bytes}"
            )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = self.shared_memory
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = []
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
            attributes.append(attribute)
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        check(self.name, driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))
        if _BLOCKING and not torch.cuda.is_current_stream_capturing():
            try:
                torch.cuda.current_stream().synchronize()
            except RuntimeError as error:  # torch's AcceleratorError
                raise KernelError(self.name, f"failed on the device: {error}") from error


@cache
def kernel(module: str, name: str, device_index: int, defines: tuple[tuple[str, int], ...] = (), beside: bool = True) -> Kernel:
    """The loaded kernel, compiled and loaded at the first call in this process."""
    return Kernel(module, name, device_index, defines, beside)


@lru_cache(maxsize=4096)
def tensor_map(
    op: str,
    address: int,
    element: torch.dtype,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: bool = True,
    promotion: int = 128,
) -> TensorMap:
    """A tensor map, SWIZZLE_128B unless said; innermost dimension first, strides in bytes from the second dimension on.

    promotion: bytes that L2 fetches at least; 256 costs 6 % of the bandwidth on pages in random order
    """
    types = driver.CUtensorMapDataType
    codes = {
        torch.float8_e4m3fn: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.bfloat16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float32: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    swizzles, promotions = driver.CUtensorMapSwizzle, driver.CUtensorMapL2promotion
    (encoded,) = check(
        op,
        driver.cuTensorMapEncodeTiled(
            codes[element], len(dims), address,
            [driver.cuuint64_t(d) for d in dims], [driver.cuuint64_t(s) for s in strides],
            [driver.cuuint32_t(b) for b in box], [driver.cuuint32_t(1)] * len(dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzle else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B if promotion == 256 else promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )  # fmt: skip
    result = TensorMap()
    ctypes.memmove(ctypes.addressof(result), int(encoded.getPtr()), ctypes.sizeof(result))
    return result


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address for an argument struct; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def struct(name: str, fields: Sequence[tuple[str, type]]) -> type[ctypes.Structure]:
    """An argument struct type mirroring the device's."""
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields)})
