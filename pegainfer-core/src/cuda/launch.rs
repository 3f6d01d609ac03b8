//! Kernels from images that the build embeds, and their launch.

use super::error;
use crate::tensor::{OpError, Tensor};
use cudarc::driver::{DriverError, result, sys};
use std::collections::HashMap;
use std::ffi::{CString, c_void};

/// The compiled kernels of one source file: a fat binary, one part for each GPU architecture of the build.
#[derive(Debug)]
pub struct Image {
    /// Name of the source file without its suffix.
    pub name: &'static str,
    /// The fat binary, 16-byte aligned; empty in a build without CUDA.
    pub bytes: &'static [u8],
}

/// Loaded images and the kernels found in them.
#[derive(Default)]
pub(super) struct Modules {
    modules: HashMap<&'static str, sys::CUmodule>,
    functions: HashMap<(&'static str, &'static str), sys::CUfunction>,
}

// SAFETY: the handles are the driver's, valid on every thread that has the context bound.
unsafe impl Send for Modules {}

impl Modules {
    pub fn function(&mut self, image: &Image, kernel: &'static str) -> Result<sys::CUfunction, DriverError> {
        if let Some(function) = self.functions.get(&(image.name, kernel)) {
            return Ok(*function);
        }
        let module = match self.modules.get(image.name) {
            Some(module) => *module,
            None if image.bytes.is_empty() => return Err(DriverError(sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU)),
            // SAFETY: the bytes are a whole fat binary made by nvcc; its header says how long it is.
            None => unsafe { result::module::load_data(image.bytes.as_ptr().cast())? },
        };
        self.modules.insert(image.name, module);
        let name = CString::new(kernel).map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))?;
        // SAFETY: the module is loaded and stays so as long as the context lives.
        let function = unsafe { result::module::get_function(module, name)? };
        self.functions.insert((image.name, kernel), function);
        Ok(function)
    }
}

/// Most arguments a kernel takes.
const MAX_ARGUMENTS: usize = 24;
/// Dynamic shared memory that a kernel may have without asking.
const PLAIN_SHARED: u32 = 48 << 10;

/// A launch being put together: arguments in the order of the kernel's parameters, then [`run`](Self::run).
pub struct Launch {
    op: &'static str,
    kernel: &'static str,
    function: sys::CUfunction,
    stream: sys::CUstream,
    /// Each argument in its own eight bytes: the driver reads as many as the parameter has, the low ones first.
    arguments: [u64; MAX_ARGUMENTS],
    count: usize,
    shared: u32,
}

impl Launch {
    pub(super) fn new(
        op: &'static str,
        kernel: &'static str,
        function: sys::CUfunction,
        stream: sys::CUstream,
    ) -> Self {
        Self { op, kernel, function, stream, arguments: [0; MAX_ARGUMENTS], count: 0, shared: 0 }
    }

    fn push(mut self, bits: u64) -> Self {
        self.arguments[self.count] = bits;
        self.count += 1;
        self
    }

    /// A pointer parameter that the kernel reads.
    pub fn input(self, tensor: &Tensor) -> Self {
        self.push(tensor.device())
    }

    /// A pointer parameter that the kernel writes.
    pub fn output(self, tensor: &mut Tensor) -> Self {
        self.push(tensor.device())
    }

    /// A pointer parameter into the workspace.
    pub fn pointer(self, address: u64) -> Self {
        self.push(address)
    }

    /// A `uint32_t` parameter.
    pub fn u32(self, value: usize) -> Self {
        debug_assert!(u32::try_from(value).is_ok());
        self.push(value as u64)
    }

    /// A `float` parameter.
    pub fn f32(self, value: f32) -> Self {
        self.push(u64::from(value.to_bits()))
    }

    /// Bytes of dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes as u32;
        self
    }

    /// Launches `grid` blocks of `threads` threads.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters in number, order and type, and the kernel must stay within the
    /// tensors it is given.
    pub unsafe fn run(mut self, grid: [usize; 3], threads: usize) -> Result<(), OpError> {
        let failed = |e: DriverError| OpError {
            message: format!("kernel {}: {}", self.kernel, error(self.op)(e).message),
            op: self.op,
        };
        let mut parameters: [*mut c_void; MAX_ARGUMENTS] = [std::ptr::null_mut(); MAX_ARGUMENTS];
        for (parameter, argument) in parameters.iter_mut().zip(&mut self.arguments) {
            *parameter = std::ptr::from_mut(argument).cast();
        }
        if self.shared > PLAIN_SHARED {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { result::function::set_function_attribute(self.function, attribute, self.shared as i32) }
                .map_err(failed)?;
        }
        let grid = (grid[0] as u32, grid[1] as u32, grid[2] as u32);
        let block = (threads as u32, 1, 1);
        let parameters = &mut parameters[..self.count];
        // SAFETY: function and stream are alive; the rest is the caller's promise.
        unsafe { result::launch_kernel(self.function, grid, block, self.shared, self.stream, parameters) }
            .map_err(failed)
    }
}
