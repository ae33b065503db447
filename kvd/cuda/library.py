"""libcuda.so.1 through ctypes: found when it is first used, every return code checked.

ctypes lets go of the GIL during each call. Only symbols are used that drivers from 470 on have; the ones that NVIDIA
replaced since (`_v2`) are named by the version whose arguments these are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from kvd.cuda.results import error_class
from kvd.errors import CudaError, CudaForked, CudaUnavailable

LIBRARY_VARIABLE = "KVD_LIBCUDA"
DEFAULT_LIBRARY = "libcuda.so.1"


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: 64 opaque bytes. Never a `c_char` array, which would end at the first zero byte."""

    _fields_ = (("reserved", c_ubyte * 64),)


class Uuid(ctypes.Structure):
    """CUuuid: 16 bytes in the order in which nvidia-smi prints them."""

    _fields_ = (("bytes", c_ubyte * 16),)


_address = c_uint64  # CUdeviceptr
_context = c_void_p
_stream = c_void_p
_device = c_int

SIGNATURES: Mapping[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(_device), c_int),
    "cuDeviceGetName": (c_char_p, c_int, _device),
    "cuDeviceGetUuid": (POINTER(Uuid), _device),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _device),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), _device),
    "cuDevicePrimaryCtxRetain": (POINTER(_context), _device),
    "cuDevicePrimaryCtxRelease": (_device,),
    "cuCtxGetCurrent": (POINTER(_context),),
    "cuCtxSetCurrent": (_context,),
    "cuMemAlloc_v2": (POINTER(_address), c_size_t),
    "cuMemFree_v2": (_address,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemsetD8_v2": (_address, c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (_address, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, _address, c_size_t),
    "cuMemcpyDtoD_v2": (_address, _address, c_size_t),
    "cuMemcpyHtoDAsync_v2": (_address, c_void_p, c_size_t, _stream),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _address, c_size_t, _stream),
    "cuMemcpyDtoDAsync_v2": (_address, _address, c_size_t, _stream),
    "cuStreamCreate": (POINTER(_stream), c_uint),
    "cuStreamSynchronize": (_stream,),
    "cuStreamDestroy_v2": (_stream,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), _address),
    "cuIpcOpenMemHandle_v2": (POINTER(_address), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_address,),
    "cuPointerGetAttribute": (c_void_p, c_int, _address),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}
"""Every driver function that kvd calls, with its arguments."""


class Library:
    """The driver in this process. `call` may be used from any thread that does not fork."""

    def __init__(self, path: str | None = None) -> None:
        """Loads and starts it: `path`, else $KVD_LIBCUDA, else libcuda.so.1.

        Raises `CudaUnavailable` with one sentence when there is no driver, no card, or the driver lacks a function.
        """
        self.path = path or os.environ.get(LIBRARY_VARIABLE) or DEFAULT_LIBRARY
        self._pid = os.getpid()
        try:
            loaded = ctypes.CDLL(self.path)
            self._functions = {name: getattr(loaded, name) for name in SIGNATURES}
        except OSError as error:
            raise CudaUnavailable(f"no NVIDIA driver here: {error}") from error
        except AttributeError as error:
            raise CudaUnavailable(f"{self.path} is no NVIDIA driver from 470 on: {error}") from error
        for name, function in self._functions.items():
            function.argtypes = SIGNATURES[name]
            function.restype = c_int
        try:
            self.call("cuInit", 0)
        except CudaForked:
            raise
        except CudaError as error:
            # Whatever the code: without cuInit there is no GPU for us.
            raise CudaUnavailable(f"no usable GPU here: {error}", call=error.call, result=error.result) from error

    def call(self, name: str, *arguments: object) -> None:
        """Calls one function. Raises the `CudaError` its return code stands for."""
        result = self.try_call(name, *arguments)
        if result:
            raise self.error(name, result)

    def try_call(self, name: str, *arguments: object) -> int:
        """The return code, for the few places where one is an answer. Raises `CudaForked` and nothing else."""
        if os.getpid() != self._pid:
            raise CudaForked(
                f"the NVIDIA driver was started in process {self._pid} and does not survive a fork; "
                f"start worker processes with spawn",
                call=name,
            )
        result: int = self._functions[name](*arguments)
        return result

    def error(self, name: str, result: int) -> CudaError:
        """What a return code other than 0 of that function stands for."""
        words = [self._text(question, result) for question in ("cuGetErrorName", "cuGetErrorString")]
        said = f"{words[0] or result} ({words[1]})" if words[1] else words[0] or f"result {result}"
        return error_class(result)(f"{name}: {said}", call=name, result=result)

    def _text(self, question: str, result: int) -> str:
        text = c_char_p()
        if self._functions[question](result, ctypes.byref(text)):
            return ""
        return (text.value or b"").decode(errors="replace")
